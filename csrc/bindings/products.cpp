// GEMMs, gradients of weights and compressed values.
#include <ATen/ops/empty.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/compression/fp8.h"
#include "cpu/compression/knapsack.h"
#include "cpu/compression/quantize.h"
#include "cpu/compression/top_k.h"
#include "ops/device/device_compression.h"
#include "ops/experts/dealt_routes.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_rule.h"
#include "ops/newton_schulz.h"
#include "ops/weight_gradient.h"

namespace pyruntime {

void bind_experts(py::module_& m) {
  m.def("share_of_rows", &share_of_rows, py::arg("experts"), py::arg("ranks"), py::arg("k"),
        "The share of all ranks' rows that a rank of experts needs, if all experts are as likely.");
  m.def(
      "deals_share", [](double share, int64_t ranks_of_rail) { return deals_share(share, ranks_of_rail); },
      py::arg("share"), py::arg("ranks_of_rail"),
      "Whether rows of which each rank needs such a share go only to the ranks that need them, on devices.");
  m.def(
      "has_grouped_gemm",
      [](const std::string& device_type) { return has_grouped_gemm(c10::Device(device_type).type()); },
      py::arg("device_type"), "Whether such devices multiply for all experts of a rank in one launch.");
  m.def(
      "set_multiplies_groups",
      [](const std::string& device_type, std::optional<bool> multiplies) {
        set_multiplies_groups(c10::Device(device_type).type(), multiplies);
      },
      py::arg("device_type"), py::arg("multiplies"),
      "Whether products of experts are one launch on such devices; None: if they are GPUs that have it.");
}

void bind_products(py::module_& m) {
  // The sink is called in backward(), without the GIL.
  m.def(
      "set_weight_gradient_sink",
      [](const at::Tensor& weight, const py::object& sink, bool keeps) {
        if (sink.is_none()) return set_weight_gradient_sink(weight, {}, keeps);
        // Destroyed with the GIL, wherever the last copy ends.
        const std::shared_ptr<py::object> shared(new py::object(sink), [](py::object* object) {
          const py::gil_scoped_acquire gil;
          delete object;
        });
        const auto take = [shared](const at::Tensor& dy, const at::Tensor& x, bool later, const Ends& ends) {
          const py::gil_scoped_acquire gil;
          ends.empty() ? (*shared)(dy, x, later) : (*shared)(dy, x, later, ends);
        };
        set_weight_gradient_sink(weight, take, keeps);
      },
      py::arg("weight"), py::arg("sink"), py::arg("keeps") = true);
  m.def(
      "write_stack_gradient",
      [](const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, const Ends& ends) {
        write_stack(out, dy, x, ends, /*accumulate=*/false);
      },
      py::arg("out"), py::arg("dy"), py::arg("x"), py::arg("ends"),
      "out[e] = dy^T x over the rows of matrix e, which end before ends[e]; zero where there are none.",
      NoGil());
  py::class_<WeightProduct, std::shared_ptr<WeightProduct>>(
      m, "WeightProduct", "out = dy^T x, or out += dy^T x, in pieces under the waits of this thread.")
      .def(py::init([](const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, bool accumulate) {
             auto product = WeightProduct::make(out, accumulate, "linear weight gradient");
             product->add(dy, x);
             return product;
           }),
           py::arg("out"), py::arg("dy"), py::arg("x"), py::arg("accumulate"))
      .def("finish", &WeightProduct::finish, NoGil());
  py::class_<NewtonSchulz, std::shared_ptr<NewtonSchulz>>(
      m, "NewtonSchulz", "A matrix made orthogonal: on the CPU in pieces, under the waits of this thread.")
      .def(py::init(&NewtonSchulz::make), py::arg("matrix"))
      .def("finish", &NewtonSchulz::finish, NoGil());
  m.def("processor_key", &processor_key);
  m.def("use_gemm_table",
        [](std::vector<int64_t> rows, std::vector<int64_t> features, std::vector<std::vector<bool>> is_ours) {
          use_gemm_table({std::move(rows), std::move(features), std::move(is_ours)});
        });
  m.def("use_gemm", &use_gemm, py::arg("ours"));
  m.def("takes_own_gemm", [](const std::string& product, int64_t rows, int64_t k, int64_t n) {
    return takes_ours(product_named(product), rows, k, n);
  });
  m.def("library_has_bf16", &library_has_bf16);
  m.def("has_own_gemm", [] { return cpu::PackedMatrix::can_hold(at::empty({1, 1}, at::kBFloat16)); });
  py::class_<WeightGemm>(m, "WeightGemm", "rows @ weight^T or rows @ weight, some rows at a time.")
      .def(py::init<const at::Tensor&, bool, int64_t>(), py::arg("weight"), py::arg("transposed"),
           py::arg("rows"))
      .def(
          "write",
          [](const WeightGemm& gemm, const at::Tensor& out, const at::Tensor& rows, bool accumulate) {
            gemm.write(out, rows, {}, accumulate);
          },
          py::arg("out"), py::arg("rows"), py::arg("accumulate"), NoGil());
  py::class_<WeightGradientGemm>(m, "WeightGradientGemm", "dy^T x, some rows at a time.")
      .def(py::init<const at::Tensor&, const at::Tensor&>(), py::arg("dy"), py::arg("x"))
      .def("write", &WeightGradientGemm::write, py::arg("out"), py::arg("first"), py::arg("accumulate"),
           NoGil())
      .def("write_blocks", &WeightGradientGemm::write_blocks, py::arg("out"), py::arg("first"),
           py::arg("step"), NoGil());
}

// Without the GIL: while a rank packs, its other threads take arriving chunks.
void bind_compression(py::module_& m) {
  m.def("quantized_bytes", &cpu::quantized_bytes, py::arg("count"), py::arg("bits"));
  m.def("quantize", &pyruntime::quantize, py::arg("values"), py::arg("bits"), py::arg("packed"),
        py::arg("residual"), py::arg("rounding"), NoGil());
  m.def("dequantize", &pyruntime::dequantize, py::arg("packed"), py::arg("bits"), py::arg("out"),
        py::arg("add"), NoGil());
  m.def("quantization_errors", &cpu::quantization_errors, py::arg("values"), py::arg("bits"),
        py::arg("residual"), NoGil());
  m.def("top_k_bytes", &cpu::top_k_bytes, py::arg("k"));
  m.def("top_k", &cpu::top_k, py::arg("values"), py::arg("k"), py::arg("packed"), py::arg("residual"),
        NoGil());
  m.def("top_k_errors", &cpu::top_k_errors, py::arg("values"), py::arg("ks"), py::arg("residual"), NoGil());
  m.def("add_top_k", &cpu::add_top_k, py::arg("packed"), py::arg("out"), NoGil());
  m.def("least_choices", &cpu::least_choices, py::arg("sizes"), py::arg("steps"), py::arg("levels"), NoGil());
  m.def("fp8_bytes", &cpu::fp8_bytes, py::arg("width"));
  m.def(
      "why_no_compression", [](const std::string& device) { return why_no_compression(c10::Device(device)); },
      py::arg("device"), NoGil());
  m.def("pack_fp8", &pyruntime::pack_fp8, py::arg("values"), py::arg("packed"), NoGil());
  m.def("unpack_fp8", &pyruntime::unpack_fp8, py::arg("packed"), py::arg("out"), NoGil());
}

}  // namespace pyruntime
