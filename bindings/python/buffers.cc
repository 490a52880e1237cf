#include "buffers.h"

#include <array>
#include <cstring>

namespace ftcomm_python {
namespace {

PyObject* array_type = nullptr;
TensorView tensor_view = nullptr;
std::array<std::int8_t, 128> plain;    // by letter: the type's number, or -1
std::array<std::int8_t, 128> complex;  // of "Z" and a letter

std::int32_t number_of(const char* format) {
    const auto* kinds = &plain;
    if (*format == 'Z') {
        kinds = &complex;
        ++format;
    }
    const auto letter = static_cast<unsigned char>(format[0]);
    if (letter == 0 || letter >= kinds->size() || format[1] != 0) return -1;  // also of a foreign byte order
    return (*kinds)[letter];
}

}  // namespace

bool Held::look(PyObject* thing, bool writable) {
    if (tensor_view != nullptr && tensor_view(thing, &view_)) return true;
    if (reinterpret_cast<PyObject*>(Py_TYPE(thing)) != array_type) return false;
    if (PyObject_GetBuffer(thing, &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
        buffer_.obj = nullptr;
        PyErr_Clear();
        return false;
    }
    view_.data = buffer_.buf;
    view_.bytes = static_cast<std::uint64_t>(buffer_.len);
    view_.count = view_.bytes / static_cast<std::uint64_t>(buffer_.itemsize);
    view_.dtype = buffer_.format != nullptr ? number_of(buffer_.format) : -1;
    return view_.dtype >= 0;
}

bool take_arrays(PyObject* type, PyObject* formats) {
    plain.fill(-1);
    complex.fill(-1);
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(formats, &at, &key, &value) != 0) {
        const char* text = PyUnicode_AsUTF8(key);
        const long number = PyLong_AsLong(value);
        if (text == nullptr || PyErr_Occurred() != nullptr) return false;
        auto& kinds = *text == 'Z' ? complex : plain;
        kinds[static_cast<unsigned char>(text[*text == 'Z' ? 1 : 0]) % kinds.size()] = static_cast<std::int8_t>(number);
    }
    array_type = Py_NewRef(type);
    return true;
}

bool take_tensors(PyObject* capsule) {
    tensor_view = reinterpret_cast<TensorView>(PyCapsule_GetPointer(capsule, kTensorView));
    return tensor_view != nullptr;
}

}  // namespace ftcomm_python
