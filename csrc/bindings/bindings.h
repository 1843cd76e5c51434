// What Python sees of the C++ core, one function for each domain. Only the files beside this one know Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pyruntime {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_comm(py::module_& m);
void bind_exchanges(py::module_& m);
void bind_experts(py::module_& m);
void bind_products(py::module_& m);
void bind_compression(py::module_& m);

}  // namespace pyruntime
