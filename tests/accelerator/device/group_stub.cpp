#include <torch/csrc/utils/pybind.h>
void bind_group(py::module_&) {}
