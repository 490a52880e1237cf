// _ftcomm_calls, whose only user is ftcomm/_calls.py.
#include "buffers.h"
#include "calls.h"
#include "method.h"

using namespace ftcomm_python;

namespace {

// configure(operators, algorithms, handle_of): once, before the first call
PyObject* configure(PyObject*, PyObject* args) {
    PyObject *operators, *algorithms, *handle_of;
    if (PyArg_ParseTuple(args, "O!O!O", &PyDict_Type, &operators, &PyDict_Type, &algorithms, &handle_of) == 0) return nullptr;
    set_names(operators, algorithms, handle_of);
    Py_RETURN_NONE;
}

PyObject* arrays(PyObject*, PyObject* args) {
    PyObject *type, *formats;
    if (PyArg_ParseTuple(args, "OO!", &type, &PyDict_Type, &formats) == 0 || !take_arrays(type, formats)) return nullptr;
    Py_RETURN_NONE;
}

PyObject* tensors(PyObject*, PyObject* capsule) {
    if (!take_tensors(capsule)) return nullptr;
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"configure", configure, METH_VARARGS, "What it has to know of Python's side."},
                           {"arrays", arrays, METH_VARARGS, "arrays(type, formats): NumPy's arrays need no long way any more."},
                           {"tensors", tensors, METH_O, "tensors(capsule): nor do torch's, by the torch extension's function."},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "_ftcomm_calls",
                          "One call for what nearly every operation needs.",
                          -1,
                          functions,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ftcomm_calls() {
    PyObject* module = PyModule_Create(&definition);
    if (module != nullptr && !(add_types(module) && add_methods(module))) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
