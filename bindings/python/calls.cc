#include "calls.h"

#include <utility>

#include "buffers.h"

namespace ftcomm_python {
namespace {

// Names to numbers. A program uses the same one again and again.
struct Numbers {
    PyObject *all = nullptr, *last = nullptr;
    std::int32_t number = 0;
};
Numbers operators, algorithms;
PyObject* handle_of = nullptr;   // cffi's object of a request's address
PyObject *handle_name, *keep_name, *operation_name, *source_name, *give_up_name;

constexpr const char* kNames[] = {"all_reduce", "broadcast", "reduce",     "all_gather", "reduce_scatter",
                                  "gather",     "scatter",   "all_to_all", "barrier"};

constexpr std::int32_t kBytes = 10;  // uint8: the type of a barrier

PyObject* the_long_way() { Py_RETURN_NOTIMPLEMENTED; }

bool number_in(Numbers& numbers, PyObject* name, std::int32_t* out) {
    if (name != numbers.last) {
        if (PyUnicode_CheckExact(name) == 0) return false;
        PyObject* number = PyDict_GetItemWithError(numbers.all, name);
        if (number == nullptr) return PyErr_Clear(), false;
        numbers.number = static_cast<std::int32_t>(PyLong_AsLong(number));
        Py_XSETREF(numbers.last, Py_NewRef(name));
    }
    *out = numbers.number;
    return true;
}

// An int, and none of its subclasses, from `least` to `most`.
bool number_of(PyObject* thing, long long least, long long most, long long* out) {
    if (PyLong_CheckExact(thing) == 0) return false;
    int overflow = 0;
    *out = PyLong_AsLongLongAndOverflow(thing, &overflow);
    return overflow == 0 && *out >= least && *out <= most;
}

// The request of a call, should it not end as usual: made before it begins, as nothing may fail then. Most calls put it back.
class Spare {
public:
    // Nothing was begun yet: false, to give up before it, with or without an exception.
    bool take(Calls* self) {
        if (self->gate->job == nullptr || PyList_GET_SIZE(self->orphans) > 0) return false;
        request_ = self->spare != nullptr ? std::exchange(self->spare, nullptr) : PyObject_CallNoArgs(self->make_request);
        return request_ != nullptr;
    }
    void put_back(Calls* self) {
        if (self->spare == nullptr) self->spare = std::exchange(request_, nullptr);  // else another thread has been as fast
    }
    PyObject* get() const { return request_; }
    Spare() = default;
    ~Spare() { Py_XDECREF(request_); }
    Spare(const Spare&) = delete;
    Spare& operator=(const Spare&) = delete;

private:
    PyObject* request_ = nullptr;
};

PyObject* not_begun() { return PyErr_Occurred() != nullptr ? nullptr : the_long_way(); }

// It did not end as usual. No Python runs, and so no signal's handler, before the request has all that must not be lost. Gives what
// Python's finish_now() does; or, of a message, the attribute of the request that is asked for.
PyObject* finish(Calls* self, Spare& spare, const char* what, int code, const ft_now& now, PyObject* one, PyObject* other,
                 PyObject* attribute = nullptr) {
    if (now.request == nullptr) {
        spare.put_back(self);
        return the_long_way();  // which says why
    }
    PyObject* request = spare.get();
    PyObject* keep = PyTuple_Pack(2, one, other);
    PyObject* handle =
        PyObject_CallFunction(handle_of, "K", static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(now.request)));
    PyObject* operation = PyUnicode_FromFormat("%s on %U", what, self->name);
    const bool had =
        keep != nullptr && handle != nullptr && operation != nullptr && PyObject_SetAttr(request, keep_name, keep) == 0 &&
        PyObject_SetAttr(request, operation_name, operation) == 0 && PyObject_SetAttr(request, handle_name, handle) == 0;
    Py_XDECREF(keep);
    Py_XDECREF(handle);
    Py_XDECREF(operation);
    PyObject* result = had ? PyObject_CallFunction(self->finish, "Oi", request, code) : nullptr;
    if (had && result == nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) {
        // Such as KeyboardInterrupt, perhaps before finish() was in its first line. The others are told.
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Py_XDECREF(PyObject_CallMethodNoArgs(request, give_up_name));
        PyErr_Restore(type, value, trace);
    }
    if (result != nullptr && attribute != nullptr) Py_SETREF(result, PyObject_GetAttr(request, attribute));
    return result;
}

PyObject* outcome(Calls* self, const ft_now& now) {
    const auto& last = self->last;
    if (self->outcome == nullptr || now.epoch != last.epoch || now.offset != last.offset || now.count != last.count ||
        now.chunks != last.chunks || now.only != last.only) {
        PyObject* made = PyObject_CallFunction(self->outcome_of, "iKKKi", now.chunks, now.offset, now.count, now.epoch, now.only);
        if (made == nullptr) return nullptr;
        Py_XSETREF(self->outcome, made);
        self->last = now;
    }
    return Py_NewRef(self->outcome);
}

// Without the GIL.
template <class F>
int unlocked(F call) {
    PyThreadState* state = PyEval_SaveThread();
    const int code = call();
    PyEval_RestoreThread(state);
    return code;
}

// What goes with the buffers' sizes; False: the long way has words for it.
bool counts(ft_op& op, const View& send, const View& recv, int rank, int size) {
    const auto n = static_cast<std::uint64_t>(size);
    op.dtype = recv.dtype;
    op.count = recv.count;
    switch (op.kind) {
        case FT_ALL_REDUCE:
        case FT_BROADCAST: op.recv = recv.data; return true;
        case FT_REDUCE:
            op.send = recv.data;
            op.recv = rank == op.root ? recv.data : nullptr;
            return true;
        case FT_ALL_GATHER: op.count = send.count; break;
        case FT_REDUCE_SCATTER: break;
        case FT_ALL_TO_ALL: op.count = send.count / n; break;
        default: return false;
    }
    op.send = send.data;
    op.recv = recv.data;
    const auto sent = op.kind == FT_ALL_GATHER ? op.count : n * op.count;
    const auto received = op.kind == FT_REDUCE_SCATTER ? op.count : n * op.count;
    return send.dtype == recv.dtype && send.count == sent && recv.count == received;
}

bool is_none(PyObject* thing) { return thing == nullptr || thing == Py_None; }

}  // namespace

PyObject* collective(Calls* self, int kind, const Given& given) {
    PyObject* buf = given.buf;
    PyObject* out = given.out != nullptr ? given.out : buf;
    ft_op op{};
    long long root = 0;
    op.kind = kind;
    op.factor = 1.0;
    op.dtype = kBytes;
    if (!is_none(given.dtype) || (given.root != nullptr && !number_of(given.root, 0, self->size - 1, &root)) ||
        (given.op != nullptr && !number_in(operators, given.op, &op.op)) ||
        (given.algorithm != nullptr && !number_in(algorithms, given.algorithm, &op.algorithm)))
        return the_long_way();
    op.root = static_cast<std::int32_t>(root);
    Held there, here;
    if (kind != FT_BARRIER) {
        const bool reduces = kind == FT_ALL_REDUCE || kind == FT_REDUCE || kind == FT_REDUCE_SCATTER;
        const bool writes = (kind != FT_REDUCE && kind != FT_BROADCAST) || (root == self->rank) == (kind == FT_REDUCE);
        if (!there.look(out, writes) || (out != buf && !here.look(buf, false)) ||
            !counts(op, here.view(), there.view(), self->rank, self->size) ||
            (reduces && ft_reduce_supported(op.dtype, op.op) == 0))
            return the_long_way();
    }
    Spare spare;
    if (!spare.take(self)) return not_begun();
    ft_now now;
    ft_job* job = self->gate->job;
    const int code = unlocked([&] { return ft_collective_now(job, self->comm, &op, self->piece, &now); });
    if (code != FT_OK)
        return finish(self, spare, kNames[kind], code, now, out != nullptr ? out : Py_None, buf != nullptr ? buf : Py_None);
    spare.put_back(self);
    return outcome(self, now);
}

PyObject* message(Calls* self, bool sends, const Given& given) {
    Held held;
    long long peer = FT_ANY, tag = 0;
    if (!is_none(given.dtype) || (given.peer != nullptr && !number_of(given.peer, sends ? 0 : FT_ANY, self->size - 1, &peer)) ||
        (given.tag != nullptr && !number_of(given.tag, INT64_MIN, INT64_MAX, &tag)) || !held.look(given.buf, !sends))
        return the_long_way();
    Spare spare;
    if (!spare.take(self)) return not_begun();
    const auto& view = held.view();
    const auto rank = peer == FT_ANY ? std::int32_t{FT_ANY_OR_FAIL} : static_cast<std::int32_t>(peer);
    ft_now now;
    ft_job* job = self->gate->job;
    const int code = unlocked([&] {
        return sends ? ft_send_now(job, self->comm, view.data, view.bytes, rank, tag, self->piece, &now)
                     : ft_recv_now(job, self->comm, view.data, view.bytes, rank, tag, self->piece, &now);
    });
    if (code == FT_OK) {
        spare.put_back(self);
        return sends ? Py_NewRef(Py_None) : PyLong_FromLong(now.source);
    }
    PyObject* result =
        finish(self, spare, sends ? "send" : "recv", code, now, given.buf, given.buf, sends ? nullptr : source_name);
    if (sends && result != nullptr && result != Py_NotImplemented) Py_SETREF(result, Py_NewRef(Py_None));
    return result;
}

namespace {

int init_calls(PyObject* object, PyObject* args, PyObject*) {
    auto* self = reinterpret_cast<Calls*>(object);
    PyObject *gate, *name, *make_request, *finish, *outcome_of, *orphans;
    unsigned long long comm = 0;
    if (PyArg_ParseTuple(args, "O!KiidUOOOO!", gate_type, &gate, &comm, &self->rank, &self->size, &self->piece, &name,
                         &make_request, &finish, &outcome_of, &PyList_Type, &orphans) == 0)
        return -1;
    self->comm = comm;
    Py_XSETREF(self->gate, reinterpret_cast<Gate*>(Py_NewRef(gate)));
    Py_XSETREF(self->name, Py_NewRef(name));
    Py_XSETREF(self->make_request, Py_NewRef(make_request));
    Py_XSETREF(self->finish, Py_NewRef(finish));
    Py_XSETREF(self->outcome_of, Py_NewRef(outcome_of));
    Py_XSETREF(self->orphans, Py_NewRef(orphans));
    return 0;
}

void free_calls(PyObject* object) {
    auto* self = reinterpret_cast<Calls*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_XDECREF(self->gate);
    for (PyObject* held :
         {self->name, self->make_request, self->finish, self->outcome_of, self->orphans, self->spare, self->outcome})
        Py_XDECREF(held);
    type->tp_free(object);
    Py_DECREF(type);
}

int init_gate(PyObject* object, PyObject* args, PyObject*) {
    unsigned long long address = 0;
    if (PyArg_ParseTuple(args, "K", &address) == 0) return -1;
    reinterpret_cast<Gate*>(object)->job = reinterpret_cast<ft_job*>(static_cast<std::uintptr_t>(address));
    return 0;
}

PyObject* close_gate(PyObject* object, PyObject*) {
    reinterpret_cast<Gate*>(object)->job = nullptr;
    Py_RETURN_NONE;
}

void free_gate(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMethodDef gate_methods[] = {{"close", close_gate, METH_NOARGS, "No call gets through any more."},
                              {nullptr, nullptr, 0, nullptr}};

PyType_Slot calls_slots[] = {{Py_tp_init, reinterpret_cast<void*>(init_calls)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(free_calls)},
                             {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                             {0, nullptr}};
PyType_Slot gate_slots[] = {{Py_tp_methods, gate_methods},
                            {Py_tp_init, reinterpret_cast<void*>(init_gate)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(free_gate)},
                            {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                            {0, nullptr}};
PyType_Spec calls_spec = {"_ftcomm_calls.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT, calls_slots};
PyType_Spec gate_spec = {"_ftcomm_calls.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT, gate_slots};

}  // namespace

PyTypeObject* gate_type = nullptr;
PyTypeObject* calls_type = nullptr;

bool add_types(PyObject* module) {
    gate_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&gate_spec));
    calls_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&calls_spec));
    if (gate_type == nullptr || calls_type == nullptr) return false;
    handle_name = PyUnicode_InternFromString("_handle");
    keep_name = PyUnicode_InternFromString("_keep");
    operation_name = PyUnicode_InternFromString("operation");
    source_name = PyUnicode_InternFromString("source");
    give_up_name = PyUnicode_InternFromString("_give_up");
    return give_up_name != nullptr && PyModule_AddObjectRef(module, "Gate", reinterpret_cast<PyObject*>(gate_type)) == 0 &&
           PyModule_AddObjectRef(module, "Calls", reinterpret_cast<PyObject*>(calls_type)) == 0;
}

void set_names(PyObject* of_operators, PyObject* of_algorithms, PyObject* of_handle) {
    operators.all = Py_NewRef(of_operators);
    algorithms.all = Py_NewRef(of_algorithms);
    handle_of = Py_NewRef(of_handle);
}

}  // namespace ftcomm_python
