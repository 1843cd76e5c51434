// Kernels of one rank in virtual time: layers, sums, the optimizer's step, compression. Most read and write
// their memory once.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda/launchers.h"
#include "sim/clock/launches.h"
#include "sim/streams.h"

extern "C" {

int pyruntime_reduce(void*, const void* const*, int32_t count_of_parts, int64_t count, int32_t dtype,
                     const void*, int64_t, int32_t most_blocks, void* stream) {
  const int64_t bytes = (count_of_parts + 1) * count * sim::size_of(dtype);
  if (most_blocks == 0) return sim::touch(stream, "reduce", bytes);
  // Beside GEMMs: it takes multiprocessors from them meanwhile.
  const sim::Work beside{"memory beside", {bytes, most_blocks}};
  const double taken = sim::Clock::instance().seconds({"multiprocessors of blocks", {most_blocks}}) /
                       sim::Clock::instance().seconds({"multiprocessors", {}});
  const c10::Device device(sim::kSim, static_cast<c10::DeviceIndex>(sim::current_device()));
  sim::queue(c10::Stream(c10::Stream::DEFAULT, device))
      .timeline()
      .go_on("reduce", sim::Clock::instance().seconds(beside) * taken);
  return sim::launch(stream, "reduce", beside);
}

int pyruntime_adamw(const PyruntimeAdamwTensor* tensors, int32_t count_of_tensors, int32_t param_dtype,
                    int32_t grad_dtype, const PyruntimeAdamwOptions*, const PyruntimeAdamwOptions*,
                    const float*, void* stream) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < count_of_tensors; ++i) {
    const PyruntimeAdamwTensor& one = tensors[i];
    const int64_t of_states = 2 * 4 * (one.master != nullptr ? 3 : 2);  // read and written
    const int64_t of_param =
        one.param == nullptr ? 0 : (one.master != nullptr ? 1 : 2) * sim::size_of(param_dtype);
    bytes += one.count * (of_states + of_param + sim::size_of(grad_dtype));
  }
  return sim::touch(stream, "adamw", bytes);
}

int pyruntime_adamw_ahead(const PyruntimeAdamwAhead* tensors, int32_t count_of_tensors, int32_t param_dtype,
                          int32_t grad_dtype, const PyruntimeAdamwOptions*, const PyruntimeAdamwOptions*,
                          float, void* stream) {
  int64_t bytes = 0;
  for (int32_t i = 0; i < count_of_tensors; ++i) {
    const bool is_late = tensors[i].earlier_grad != nullptr;
    const int64_t of_states = 4 * 3 * (is_late ? 2 : 1),
                  of_grads = (is_late ? 2 : 1) * sim::size_of(grad_dtype);
    bytes += tensors[i].tensor.count * (of_states + of_grads + sim::size_of(param_dtype));
  }
  return sim::touch(stream, "adamw_ahead", bytes);
}

int pyruntime_rms_norm(const PyruntimeRmsNorm* norm, void* stream) {
  const int64_t elements = norm->rows * norm->columns, passes = norm->also != nullptr ? 4 : 2;
  return sim::touch(stream, "rms_norm", passes * elements * sim::size_of(norm->dtype));
}

// As the kernels have it where a row is longer than a thousand elements.
int64_t pyruntime_rms_norm_parts(int32_t, int64_t rows, int64_t) {
  return std::clamp<int64_t>((rows + 3) / 4, 1, 256);
}

int pyruntime_rms_norm_backward(const PyruntimeRmsNorm* norm, void* stream) {
  const int64_t elements = norm->rows * norm->columns, passes = norm->also != nullptr ? 4 : 3;
  const int64_t parts = 4 * norm->columns * pyruntime_rms_norm_parts(norm->dtype, norm->rows, norm->columns);
  sim::touch(stream, "rms_norm_backward", passes * elements * sim::size_of(norm->dtype) + parts);
  return sim::touch(stream, "rms_norm_backward", parts);
}

int pyruntime_swiglu(const PyruntimeSwiglu* swiglu, void* stream) {
  return sim::touch(stream, "swiglu", 3 * swiglu->rows * swiglu->features * sim::size_of(swiglu->dtype));
}

int pyruntime_swiglu_backward(const PyruntimeSwiglu* swiglu, void* stream) {
  return sim::touch(stream, "swiglu_backward",
                    5 * swiglu->rows * swiglu->features * sim::size_of(swiglu->dtype));
}

int pyruntime_weighted_gating(const PyruntimeGating* gating, void* stream) {
  const int64_t row = 3 * gating->features * sim::size_of(gating->dtype) + 4;
  return sim::touch(stream, "weighted_gating", gating->rows * row);
}

int pyruntime_weighted_gating_backward(const PyruntimeGating* gating, void* stream) {
  const int64_t row = 6 * gating->features * sim::size_of(gating->dtype) + 8;
  return sim::touch(stream, "weighted_gating_backward", gating->rows * row);
}

// Experts get equal shares of the rows. To a group of several experts goes the share of the rows that have
// one of them among k that are drawn: 1 - C(E - n, k) / C(E, k).
int pyruntime_sort_routes(const PyruntimeRoutes* routes, void* stream) {
  const int64_t experts = std::max<int64_t>(sim::Clock::instance().experts(), 1);
  std::vector<int64_t> counts;
  for (int64_t group = 0; group < routes->groups; ++group) {
    const int64_t first = routes->first + group * routes->per;
    const int64_t held = std::clamp<int64_t>(experts - first, 0, routes->per);
    double without = 1;
    for (int64_t slot = 0; slot < routes->slots; ++slot)
      without *= static_cast<double>(std::max<int64_t>(experts - held - slot, 0)) / (experts - slot);
    const double share = routes->per == 1 ? static_cast<double>(held * routes->slots) / experts : 1 - without;
    counts.push_back(static_cast<int64_t>(static_cast<double>(routes->rows) * share));
  }
  const int64_t size = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  sim::Clock::instance().write_numbers(routes->counts, std::move(counts));
  const int64_t places = routes->rows * routes->slots;
  const int64_t blocks = pyruntime_sort_routes_scratch(routes->rows, routes->slots, routes->groups);
  sim::touch(stream, "sort_routes", 4 * places + 4 * blocks);
  sim::touch(stream, "sort_routes", 8 * blocks);
  return sim::touch(stream, "sort_routes", 4 * places + 4 * places + 4 * blocks + 20 * size);
}

int64_t pyruntime_sort_routes_scratch(int64_t rows, int32_t slots, int32_t groups) {
  return (rows * slots + 511) / 512 * groups;
}

int pyruntime_sum_places(const PyruntimePlaceSums* sums, void* stream) {
  const int64_t bytes = (sums->held + sums->rows) * sums->columns * sim::size_of(sums->dtype);
  return sim::touch(stream, "sum_places", bytes + 4 * sums->rows * sums->slots);
}

int pyruntime_rope(const PyruntimeRope* rope, void* stream) {
  int64_t heads = 0;
  for (int i = 0; i < 3; ++i) {
    if (rope->from[i].data != rope->to[i].data || i < 2) heads += rope->heads[i];
  }
  const int64_t bytes =
      2 * heads * rope->batch * rope->positions * rope->head_dim * sim::size_of(rope->dtype);
  return sim::touch(stream, "rope", bytes);
}

int pyruntime_cross_entropy_stats(const PyruntimeLogits* logits, float*, void* stream) {
  return sim::touch(stream, "cross_entropy_stats",
                    logits->rows * logits->columns * sim::size_of(logits->dtype));
}

int pyruntime_cross_entropy_gradient(const PyruntimeLogits* logits, const float*, const float*, void*,
                                     int64_t, void* stream) {
  return sim::touch(stream, "cross_entropy_gradient",
                    2 * logits->rows * logits->columns * sim::size_of(logits->dtype));
}

int pyruntime_pack_fp8(const void*, int32_t dtype, int64_t rows, int64_t width, uint8_t*, void* stream) {
  return sim::touch(stream, "pack_fp8", rows * width * (sim::size_of(dtype) + 1));
}

int pyruntime_unpack_fp8(const uint8_t*, int64_t rows, int64_t width, void*, int32_t dtype, void* stream) {
  return sim::touch(stream, "unpack_fp8", rows * width * (sim::size_of(dtype) + 1));
}

int pyruntime_quantize(const PyruntimeQuantized* quantized, void* stream) {
  const int64_t of_residual = quantized->residual != nullptr ? 8 : 0;
  return sim::touch(stream, "quantize",
                    quantized->count * (sim::size_of(quantized->dtype) + of_residual) +
                        quantized->count * quantized->bits / 8);
}

int pyruntime_dequantize(const uint8_t*, int32_t bits, float*, int64_t count, int32_t add, void* stream) {
  return sim::touch(stream, "dequantize", count * bits / 8 + count * (add ? 8 : 4));
}

}  // extern "C"
