// A communicator's waiting calls, as one call to C each: for arrays and tensors that nothing has to be said about. Whatever is otherwise
// gives NotImplemented, before anything was begun, and Python goes the long way.
#pragma once

#include <Python.h>

#include "ftcomm/ftcomm.h"

namespace ftcomm_python {

// A job's handle, until its close().
struct Gate {
    PyObject_HEAD ft_job* job;
};

struct Calls {
    PyObject_HEAD Gate* gate;
    PyObject *name, *make_request, *finish, *outcome_of, *orphans;  // of Python's side; see calls() in _calls.py
    PyObject* spare;  // a request for what does not end as usual: then nothing may fail any more that makes one
    PyObject* outcome;  // the last one: nearly always the next one, too
    ft_comm comm;
    int rank, size;
    double piece;  // seconds of one wait: a signal that comes before it sleeps wakes nobody
    ft_now last;
};

// As the user has given them, borrowed; null: left out, which only what has a default can be.
struct Given {
    PyObject *buf, *out, *op, *algorithm, *root, *peer, *tag, *dtype;
};

// An outcome, or NotImplemented. `kind`: FT_ALL_REDUCE, ...; `out` left out: `buf` is it.
PyObject* collective(Calls* self, int kind, const Given& given);
// None, of a receive the source; or NotImplemented.
PyObject* message(Calls* self, bool sends, const Given& given);

extern PyTypeObject* gate_type;
extern PyTypeObject* calls_type;
bool add_types(PyObject* module);
// Borrowed for good: names to numbers, and what makes cffi's object of a request's address.
void set_names(PyObject* operators, PyObject* algorithms, PyObject* handle_of);

}  // namespace ftcomm_python
