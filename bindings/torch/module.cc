// What Python sees of the extension; ftcomm/torch/ is its only user.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "../python/view.h"
#include "backend.h"
#include "pool.h"
#include "tensors.h"

namespace py = pybind11;
using namespace ftcomm_torch;

namespace {

std::vector<int> set_bits(const std::vector<std::uint8_t>& flags) {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < flags.size(); ++i) {
        if (flags[i] != 0) ranks.push_back(static_cast<int>(i));
    }
    return ranks;
}

// (contributors, [(offset, count, contributors)], epoch), or None for a Work that is no finished operation of ours.
py::object outcome(const c10::intrusive_ptr<c10d::Work>& work) {
    auto* own = dynamic_cast<FtWork*>(work.get());
    if (own == nullptr || !own->operation().done() || own->operation().error()) return py::none();
    py::list pieces;
    for (const auto& piece : own->operation().pieces()) {
        pieces.append(py::make_tuple(piece.offset, piece.count, py::tuple(py::cast(set_bits(piece.flags)))));
    }
    return py::make_tuple(py::tuple(py::cast(set_bits(own->operation().contributors()))), pieces, own->operation().epoch());
}

std::shared_ptr<torch::jit::PythonFutureWrapper> wrapped(c10::intrusive_ptr<c10::ivalue::Future> future) {
    return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

// In a backward pass (a DDP hook written in Python) the future is complete when the hook gets it. Its callbacks then run at
// once, in the order of the buckets; were they run when an operation happens to end, the operations that they start
// (PowerSGD) would come in a different order on each rank. (A message may need what this rank calls next.)
std::shared_ptr<torch::jit::PythonFutureWrapper> future_for_python(FtWork& work) {
    const auto type = work.retrieveOpType();
    const bool message = type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
    if (!message && torch::autograd::get_current_graph_task_id() != -1) work.settle();
    return wrapped(work.getFuture());
}

// The first tensor of a work's future as a Python object, as DDP wants it of a hook. Not by a Python callback: that would turn
// every error into a RuntimeError.
std::shared_ptr<torch::jit::PythonFutureWrapper> tensor_future(const c10::intrusive_ptr<c10d::Work>& work) {
    return wrapped(work->getFuture()->then(
        [](c10::ivalue::Future& list) {
            const at::Tensor tensor = list.value().toTensorVector().at(0);
            py::gil_scoped_acquire gil;
            return torch::jit::toIValue(py::cast(tensor), c10::PyObjectType::get());
        },
        c10::PyObjectType::get()));
}

// Which any thread may let go.
std::shared_ptr<py::function> held(py::function fn) {
    return {new py::function(std::move(fn)), [](py::function* f) {
                py::gil_scoped_acquire gil;
                delete f;
            }};
}

// Told to Python, which has no say in what comes of it.
std::function<void()> notice(py::function fn, const char* what) {
    return [fn = held(std::move(fn)), what] {
        py::gil_scoped_acquire gil;
        try {
            (*fn)();
        } catch (py::error_already_set& e) { e.discard_as_unraisable(what); }
    };
}

// For the direct API's calls: an ordinary dense tensor in this process's memory.
bool view_tensor(PyObject* object, ftcomm_python::View* view) {
    if (!THPVariable_CheckExact(object)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.layout() != at::kStrided || !tensor.is_cpu() || !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg())
        return false;
    try {
        view->data = tensor.data_ptr();
    } catch (const c10::Error&) { return false; }  // one without memory, as while something is traced
    view->count = static_cast<std::uint64_t>(tensor.numel());
    view->bytes = static_cast<std::uint64_t>(tensor.nbytes());
    view->dtype = known_type(tensor.scalar_type());
    return view->dtype >= 0;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    // The base classes are registered by torch itself.
    py::module_::import("torch.distributed");

    m.attr("torch_version") = FTCOMM_TORCH_VERSION;

    py::class_<JobRef, std::shared_ptr<JobRef>>(m, "JobRef")
        .def(py::init([](std::uintptr_t job, py::function on_unused) {
                 return std::make_shared<JobRef>(reinterpret_cast<ft_job*>(job),
                                                 notice(std::move(on_unused), "ftcomm: leaving the job"));
             }),
             py::arg("job"), py::arg("on_unused"))
        .def("retire", &JobRef::retire, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("pointer", &JobRef::pointer)
        .def_property_readonly("closed", &JobRef::closed);

    // torch copies a group's options for those that it splits off.
    py::class_<FtOptions, c10d::Backend::Options, c10::intrusive_ptr<FtOptions>>(m, "FtOptions")
        .def_readonly("policy", &FtOptions::policy)
        .def("__deepcopy__", [](const FtOptions& self, const py::dict&) { return c10::make_intrusive<FtOptions>(self); });

    py::class_<FtWork, c10d::Work, c10::intrusive_ptr<FtWork>>(m, "FtWork").def("get_future", &future_for_python);
    py::class_<FtGroupWork, c10d::Work, c10::intrusive_ptr<FtGroupWork>>(m, "FtGroupWork");

    py::class_<FtBackend, c10d::Backend, c10::intrusive_ptr<FtBackend>>(m, "FtBackend")
        .def(py::init([](std::shared_ptr<JobRef> job, std::uint64_t id, std::string name, std::vector<std::int32_t> slots,
                         int rank, int policy, double timeout) {
                 py::gil_scoped_release release;
                 return c10::make_intrusive<FtBackend>(std::move(job), id, std::move(name), std::move(slots), rank, policy,
                                                       timeout);
             }),
             py::arg("job"), py::arg("id"), py::arg("name"), py::arg("slots"), py::arg("rank"), py::arg("policy"),
             py::arg("timeout"))
        .def_property_readonly("comm_id", &FtBackend::id)
        .def_property_readonly("comm_name", &FtBackend::name)
        .def_property_readonly("slots", &FtBackend::slots)
        .def_property_readonly("policy", &FtBackend::policy)
        .def_property_readonly("timeout_seconds", &FtBackend::timeout)
        .def_property_readonly("solo", &FtBackend::solo)
        .def_property_readonly("closed", &FtBackend::closed)
        .def_property_readonly("job", &FtBackend::job)
        .def_property_readonly("used_lane", &FtBackend::used_lane)
        .def(
            "drain", [](FtBackend& self) { return static_cast<int>(self.drain()); }, py::call_guard<py::gil_scoped_release>())
        .def("set_on_lane",
             [](FtBackend& self, py::function fn) {
                 self.set_on_lane(notice(std::move(fn), "ftcomm: the first operation on a device"));
             })
        .def("set_device",
             [](FtBackend& self, py::function fn) {
                 self.set_device([fn = held(std::move(fn))] {
                     py::gil_scoped_acquire gil;
                     (*fn)();
                 });
             })
        .def_property_readonly("aborted", &FtBackend::aborted)
        .def_property_readonly("options", &FtBackend::getBackendOptions)
        .def_property("stand_in", &FtBackend::stand_in, &FtBackend::set_stand_in)
        .def_property_readonly("alive", [](FtBackend& self) { return py::tuple(py::cast(set_bits(self.alive()))); })
        // torch calls it on ranks outside a new group when the default group is bound to a device; nothing to do here.
        .def("perform_nocolor_split", [](FtBackend&, const py::object&) {});

    m.attr("tensor_view") = py::capsule(reinterpret_cast<void*>(&view_tensor), ftcomm_python::kTensorView);
    m.def("outcome", &outcome, py::arg("work"));
    m.def(
        "settle", [](double seconds) { Pool::get().settle(seconds); }, py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
    m.def("tensor_future", &tensor_future, py::arg("work"));
    m.def("set_error_class", [](const py::object& cls) { set_error_class(cls.ptr()); });
    m.def("take_detail", []() -> py::object {
        int code = 0;
        std::string detail;
        if (!take_detail(&code, &detail)) return py::none();
        return py::make_tuple(code, py::str(detail));
    });
}
