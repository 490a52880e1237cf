// Memory of arrays and tensors that nothing has to be said about; of all others Python's buffers.py knows what to do with them.
#pragma once

#include "view.h"

namespace ftcomm_python {

// Held while the memory is in use.
class Held {
public:
    Held() = default;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
    }
    // False, without an exception: the long way.
    bool look(PyObject* thing, bool writable);
    const View& view() const { return view_; }

private:
    Py_buffer buffer_{};
    View view_;
};

// NumPy's array type, and the numbers of its elements' types by struct's letters: {"f": 1, ...}
bool take_arrays(PyObject* type, PyObject* formats);
bool take_tensors(PyObject* capsule);

}  // namespace ftcomm_python
