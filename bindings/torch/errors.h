// What a failed operation carries: the ftcomm error, on its way to Python.
#pragma once

#include <exception>
#include <string>

#include <torch/csrc/Exceptions.h>

namespace ftcomm_torch {

// Reaches Python as ftcomm.torch.BackendError, a torch.distributed.DistBackendError whose __cause__ is the ftcomm.Error,
// from every place that torch rethrows it (a Work's wait, a Future, the autograd engine), any number of times:
// torch asks for the Python class and calls it with the text, and the class then takes the detail left for its thread.
class FtError final : public torch::PyTorchError {
public:
    FtError(int code, std::string detail, std::string message);
    PyObject* python_type() override;

    const int code;
    const std::string detail;  // the JSON of ft_last_error()
};

// The error for a code that a C function has just returned on this thread.
std::exception_ptr last_error(int code);
// A mistake of the caller found before anything was sent (FT_INVALID), or another code found on this side.
std::exception_ptr own_error(int code, const std::string& message, const std::string& ranks = "[]");
// The code inside, or FT_INTERNAL for an exception of another kind.
int code_of(const std::exception_ptr& error);

// For Python: the class to raise, and the detail that python_type() left for this thread.
void set_error_class(PyObject* cls);
bool take_detail(int* code, std::string* detail);

// Thrown while a call is being prepared; becomes a failed Work, never an exception of the call.
[[noreturn]] void refuse(const std::string& message, int code = 7 /* FT_INVALID */);

}  // namespace ftcomm_torch
