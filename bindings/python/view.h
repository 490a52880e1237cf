// A buffer as its Python object shows it. Torch's tensors are looked at by the torch extension, which passes the function in a capsule.
#pragma once

#include <Python.h>

#include <cstdint>

namespace ftcomm_python {

struct View {
    void* data = nullptr;
    std::uint64_t count = 0, bytes = 0;  // elements, and what they take
    std::int32_t dtype = -1;
};

// False, without an exception: no tensor, or one that has to be looked at from all sides.
using TensorView = bool (*)(PyObject*, View*);
inline constexpr const char* kTensorView = "ftcomm.tensor_view";

}  // namespace ftcomm_python
