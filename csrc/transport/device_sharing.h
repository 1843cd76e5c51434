// Fused kernels, and how they share a device with other work on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/descriptor.h"

namespace pyruntime {

// A GEMM whose rows move between the ranks while one kernel computes it: out = a weight^T (+ bias), or
// a weight. Matrices, of one dtype.
struct FusedGemm {
  at::Tensor a;       // [rows, K]
  at::Tensor weight;  // [N, K] where it is transposed, else [K, N]
  bool transposed;
  at::Tensor bias;  // [N] or undefined
  at::Tensor out;   // [rows, N], contiguous
  // One of DeviceSharing::tiles(); empty: by the kernel's rule.
  std::string tiles;
};

// The fused kernels of a transport between devices.
class DeviceSharing {
 public:
  virtual ~DeviceSharing() = default;

  // Says why multiply() cannot run such a flight; empty if it can. The answer is the same on all ranks.
  virtual std::string why_not_fused(const FlightDescriptor& descriptor) const = 0;
  // Names of the tiles that FusedGemm::tiles accepts.
  virtual std::vector<std::string> tiles() const = 0;
  // The tile names that the kernel's rule does not choose for [rows, k] x [k, n]; rows are of all ranks.
  virtual std::vector<std::string> other_tiles(int64_t rows, int64_t n, int64_t k) const = 0;
  // Says why the kernel of a GEMM [rows, *] x [*, n] would find no room beside others that are, or may be,
  // under way on this rank's device; empty if it would. Rows are of all ranks. A caller may insist: the
  // kernel then waits for the others, or cannot be captured.
  virtual std::string why_crowded(int64_t rows, int64_t n) const = 0;
  // Whether the caller's stream is captured into a graph instead of running now.
  virtual bool is_capturing() const = 0;

  // Counts ops that were not fused, for the reason that why_crowded() gave.
  struct Crowding {
    int64_t ops = 0;
    std::string why;  // of the last one
  };
  // Whether there is room; otherwise the op is counted.
  bool makes_room_for(int64_t rows, int64_t n);
  Crowding crowding(int64_t rows, int64_t n) const;

 private:
  std::map<std::pair<int64_t, int64_t>, Crowding> crowding_;  // by rows and n
};

}  // namespace pyruntime
