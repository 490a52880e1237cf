#include "method.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "calls.h"

namespace ftcomm_python {
namespace {

constexpr int kSend = -1, kReceive = -2;  // no collective's kind

using Role = PyObject* Given::*;

struct Parameter {
    const char* name;
    Role role;
    PyObject* interned = nullptr;  // as names in a program's text are
};

// As in collectives.py and point_to_point.py, in their order. What is left out has the default that they say.
struct Form {
    const char* name;
    int kind, needed;
    std::array<Parameter, 4> parameters;
};

constexpr Parameter kBuf{"buf", &Given::buf}, kOut{"out", &Given::out}, kOp{"op", &Given::op}, kRoot{"root", &Given::root},
    kDtype{"dtype", &Given::dtype}, kTag{"tag", &Given::tag};

Form forms[] = {
    {"all_reduce", FT_ALL_REDUCE, 1, {kBuf, kOp, {"algorithm", &Given::algorithm}, kDtype}},
    {"broadcast", FT_BROADCAST, 1, {kBuf, kRoot, kDtype}},
    {"reduce", FT_REDUCE, 1, {kBuf, kRoot, kOp, kDtype}},
    {"all_gather", FT_ALL_GATHER, 2, {kOut, kBuf, kDtype}},
    {"reduce_scatter", FT_REDUCE_SCATTER, 2, {kOut, kBuf, kOp, kDtype}},
    {"all_to_all", FT_ALL_TO_ALL, 2, {kOut, kBuf}},
    {"barrier", FT_BARRIER, 0, {}},
    {"send", kSend, 2, {kBuf, {"dst", &Given::peer}, kTag, kDtype}},
    {"recv", kReceive, 1, {kBuf, {"src", &Given::peer}, kTag, kDtype}},
};

struct Method {
    PyObject_HEAD PyObject *function, *attributes;
    vectorcallfunc call;
    const Form* form;
};

PyObject* calls_name;

// False: Python has words for it, or takes what is not known here.
bool sort(const Form& form, PyObject* const* args, Py_ssize_t n, PyObject* names, Given& given) {
    const auto& all = form.parameters;
    if (n > static_cast<Py_ssize_t>(all.size())) return false;
    for (Py_ssize_t i = 0; i < n; ++i) {
        const auto& parameter = all[static_cast<std::size_t>(i)];
        if (parameter.name == nullptr) return false;
        given.*parameter.role = args[i];
    }
    const auto named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        Role role = nullptr;
        for (const auto& parameter : all)
            if (name == parameter.interned) role = parameter.role;
        if (role == nullptr || given.*role != nullptr) return false;
        given.*role = args[n + i];
    }
    for (int i = 0; i < form.needed; ++i)
        if (given.*all[static_cast<std::size_t>(i)].role == nullptr) return false;
    return true;
}

PyObject* short_way(const Form& form, PyObject* communicator, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    Given given{};
    if (!sort(form, args, n, names, given)) return Py_NewRef(Py_NotImplemented);
    PyObject* calls = PyObject_GetAttr(communicator, calls_name);  // held: another thread may close the communicator meanwhile
    if (calls == nullptr) return nullptr;
    PyObject* result;
    auto* self = reinterpret_cast<Calls*>(calls);
    if (Py_TYPE(calls) != calls_type) result = Py_NewRef(Py_NotImplemented);
    else if (form.kind >= 0) result = collective(self, form.kind, given);
    else result = message(self, form.kind == kSend, given);
    Py_DECREF(calls);
    return result;
}

PyObject* call(PyObject* object, PyObject* const* args, std::size_t flagged, PyObject* names) {
    auto* self = reinterpret_cast<Method*>(object);
    const auto n = PyVectorcall_NARGS(flagged);
    if (n > 0) {
        PyObject* result = short_way(*self->form, args[0], args + 1, n - 1, names);
        if (result != Py_NotImplemented) return result;
        Py_DECREF(result);
    }
    return PyObject_Vectorcall(self->function, args, flagged, names);
}

PyObject* bound(PyObject* object, PyObject* instance, PyObject*) {
    return instance == nullptr || instance == Py_None ? Py_NewRef(object) : PyMethod_New(object, instance);
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* function;
    if (PyArg_ParseTuple(args, "O", &function) == 0) return nullptr;
    PyObject* name = PyObject_GetAttrString(function, "__name__");
    const char* text = name != nullptr ? PyUnicode_AsUTF8(name) : nullptr;
    if (text == nullptr) return Py_XDECREF(name), nullptr;
    const Form* form = nullptr;
    for (const auto& one : forms)
        if (std::strcmp(one.name, text) == 0) form = &one;
    Py_DECREF(name);
    if (form == nullptr) return PyErr_Format(PyExc_ValueError, "%R has no compiled call", function), nullptr;
    auto* self = reinterpret_cast<Method*>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->function = Py_NewRef(function);
    self->call = call;
    self->form = form;
    return reinterpret_cast<PyObject*>(self);
}

int visit_held(PyObject* object, visitproc visit, void* arg) {
    auto* self = reinterpret_cast<Method*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->function);
    Py_VISIT(self->attributes);
    return 0;
}

int clear(PyObject* object) {
    auto* self = reinterpret_cast<Method*>(object);
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->function);
    return 0;
}

void free_method(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyObject* all_names() {
    for (auto& form : forms)
        for (auto& parameter : form.parameters)
            if (parameter.name != nullptr && (parameter.interned = PyUnicode_InternFromString(parameter.name)) == nullptr)
                return nullptr;
    PyObject* list = PyTuple_New(static_cast<Py_ssize_t>(std::size(forms)));
    for (std::size_t i = 0; list != nullptr && i < std::size(forms); ++i) {
        PyObject* name = PyUnicode_InternFromString(forms[i].name);
        if (name == nullptr) Py_CLEAR(list);
        else PyTuple_SET_ITEM(list, static_cast<Py_ssize_t>(i), name);
    }
    return list;
}

}  // namespace

bool add_methods(PyObject* module) {
    static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
                                    {"__dictoffset__", T_PYSSIZET, offsetof(Method, attributes), READONLY, nullptr},
                                    {nullptr, 0, 0, 0, nullptr}};
    static PyGetSetDef more[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};
    static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                  {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                  {Py_tp_descr_get, reinterpret_cast<void*>(bound)},
                                  {Py_tp_traverse, reinterpret_cast<void*>(visit_held)},
                                  {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(free_method)},
                                  {Py_tp_members, members},
                                  {Py_tp_getset, more},
                                  {0, nullptr}};
    static PyType_Spec spec = {
        "_ftcomm_calls.Method", sizeof(Method), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
    calls_name = PyUnicode_InternFromString("_calls");
    PyObject* type = calls_name != nullptr ? PyType_FromSpec(&spec) : nullptr;
    PyObject* list = type != nullptr ? all_names() : nullptr;
    const bool added = list != nullptr && PyModule_AddObjectRef(module, "Method", type) == 0 &&
                       PyModule_AddObjectRef(module, "METHODS", list) == 0;
    Py_XDECREF(type);
    Py_XDECREF(list);
    return added;
}

}  // namespace ftcomm_python
