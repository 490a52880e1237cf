// A waiting method of a communicator in front of Python's one of that name, which is its long way: no frame of Python is made where the
// compiled call does all of it.
#pragma once

#include <Python.h>

namespace ftcomm_python {

// Adds Method(function): called as the function, and found on an object as one.
bool add_methods(PyObject* module);

}  // namespace ftcomm_python
