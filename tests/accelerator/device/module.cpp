// The Python module: what pretend.py makes a device, a ledger and a process group of.
#include <torch/csrc/utils/pybind.h>

#include "fallback.h"
#include "generator.h"
#include "memory.h"

void bind_group(py::module_& m);

namespace pretend {
namespace {
py::object* observer = nullptr;

void report_to_python(const char* kind, const std::string& text) {
  if (!observer || !Py_IsInitialized()) return;
  py::gil_scoped_acquire held;
  try {
    (*observer)(kind, text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the observer of the pretended device");
  }
}

std::string place_in_python() {
  if (!observer || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire held;
  return py::str((*observer)("place", ""));
}

void run_without_lock(void (*call)(void*), void* argument) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return call(argument);
  py::gil_scoped_release released;
  call(argument);
}

void bind_device(py::module_& m) {
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", [](int device) {
    TORCH_CHECK(0 <= device && device < device_count(), "there is no device ", device, ", only ", device_count());
    set_current_device(device);
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("bytes", [](int device) { return ledger().bytes(device); });
  m.def("peak", [](int device) { return ledger().peak(device); });
  m.def("reset_peak", [](int device) { ledger().reset_peak(device); });
  m.def("limit_memory", &limit_memory);
  m.def("resize_storage", [](const at::Tensor& of, size_t bytes) { resize_bytes(of.storage(), bytes); });
}

void bind_ledger(py::module_& m) {
  m.def("observe", [](const py::object& call) {
    observer = new py::object(call);  // Kept for good: a thread of the device may report at any time.
    set_reporter(&report_to_python);
    set_blocking(&run_without_lock);
  });
  m.def("places", [](bool on) { ledger().place = on ? &place_in_python : nullptr; });
  m.def("forget", [] { ledger().forget(); });
  m.def("counts", [] {
    auto found = ledger().counts();
    return py::dict(
        py::arg("launches") = found.launches, py::arg("accesses") = found.accesses, py::arg("races") = found.races,
        py::arg("synchronisations") = found.synchronisations, py::arg("blocks") = found.blocks);
  });
  m.def("keep_hosts_apart", [](bool apart) { ledger().keep_hosts_apart(apart); });
  m.def("host_release", [](int64_t token) { ledger().host_release(token); });
  m.def("host_acquire", [](int64_t token) { ledger().host_acquire(token); });
}

void bind_streams(py::module_& m) {
  m.def("deferring", &deferring);
  m.def("defer", [](bool on, double lag) { without_python([&] { defer(on, lag); }); });
  m.def("sleep", [](double seconds, int device) {
    without_python([&] { sleep_on(current_stream(device < 0 ? current_device() : device), seconds); });
  });
  m.def("hang", [](int device) { hang_on(current_stream(device < 0 ? current_device() : device)); });
  m.def("let_go", &let_go_of_hangs);
  m.def("forget_error", &forget_device_error);
  m.def("unshaped", &unshaped);
}
}  // namespace
}  // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pretend::bind_device(m);
  pretend::bind_ledger(m);
  pretend::bind_streams(m);
  bind_group(m);
}
