#include "ops/device/device_compression.h"

#include <c10/util/Exception.h>

#include "cpu/compression/fp8.h"
#include "cpu/compression/quantize.h"
#include "ops/device/device_call.h"
#include "transport/device/library.h"

namespace pyruntime {

namespace {

const DeviceLibrary& kernels_for(const char* op, const at::Tensor& values) {
  std::string why_not;
  const DeviceLibrary* library = DeviceLibrary::find(values.device().type(), why_not);
  TORCH_CHECK_NOT_IMPLEMENTED(library != nullptr, op, ": ", why_not, ".");
  return *library;
}

}  // namespace

std::string why_no_compression(c10::Device device) {
  std::string why_not;
  if (!device.is_cpu()) DeviceLibrary::find(device.type(), why_not);
  return why_not;
}

void pack_fp8(const at::Tensor& values, const at::Tensor& packed) {
  cpu::check_fp8(values, packed, "pack_fp8");
  if (values.is_cpu()) return cpu::pack_fp8(values, packed);
  const DeviceLibrary& library = kernels_for("pack_fp8", values);
  const DeviceCall call(values.device());
  library.check(library.pack_fp8(values.const_data_ptr(), dtype_code(values.scalar_type()), values.size(0),
                                 values.size(1), packed.mutable_data_ptr<uint8_t>(), call.stream));
}

void unpack_fp8(const at::Tensor& packed, const at::Tensor& out) {
  cpu::check_fp8(out, packed, "unpack_fp8");
  if (out.is_cpu()) return cpu::unpack_fp8(packed, out);
  const DeviceLibrary& library = kernels_for("unpack_fp8", out);
  const DeviceCall call(out.device());
  library.check(library.unpack_fp8(packed.const_data_ptr<uint8_t>(), out.size(0), out.size(1),
                                   out.mutable_data_ptr(), dtype_code(out.scalar_type()), call.stream));
}

void quantize(const at::Tensor& values, int64_t bits, const at::Tensor& packed,
              const std::optional<at::Tensor>& residual,
              const std::optional<std::pair<int64_t, int64_t>>& rounding) {
  cpu::check_quantize(values, bits, packed, residual);
  if (values.is_cpu()) return cpu::quantize(values, bits, packed, residual, rounding);
  const DeviceLibrary& library = kernels_for("quantize", values);
  const DeviceCall call(values.device());
  const auto [seed, first] = rounding.value_or(std::pair<int64_t, int64_t>{0, 0});
  const PyruntimeQuantized quantized{dtype_code(values.scalar_type()),
                                     static_cast<int32_t>(bits),
                                     values.numel(),
                                     values.const_data_ptr(),
                                     residual ? residual->mutable_data_ptr<float>() : nullptr,
                                     packed.mutable_data_ptr<uint8_t>(),
                                     rounding.has_value() ? 1 : 0,
                                     static_cast<uint32_t>(seed),
                                     static_cast<uint32_t>(first)};
  library.check(library.quantize(&quantized, call.stream));
}

void dequantize(const at::Tensor& packed, int64_t bits, const at::Tensor& out, bool add) {
  cpu::check_dequantize(packed, bits, out);
  if (out.is_cpu()) return cpu::dequantize(packed, bits, out, add);
  const DeviceLibrary& library = kernels_for("dequantize", out);
  const DeviceCall call(out.device());
  library.check(library.dequantize(packed.const_data_ptr<uint8_t>(), static_cast<int32_t>(bits),
                                   out.mutable_data_ptr<float>(), out.numel(), add ? 1 : 0, call.stream));
}

}  // namespace pyruntime
