// Fused kernels, and how they share a device with what else runs on it.
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

  // Why multiply() cannot be asked of such a flight; empty where it can. An answer for all ranks.
  virtual std::string why_not_fused(const FlightDescriptor& descriptor) const = 0;
  // Names of the tiles that a fused GEMM may be asked to be made of (FusedGemm::tiles).
  virtual std::vector<std::string> tiles() const = 0;
  // Those that are not what the kernel's rule takes for [rows, k] x [k, n], rows being of all ranks.
  virtual std::vector<std::string> other_tiles(int64_t rows, int64_t n, int64_t k) const = 0;
  // Why the kernel of a GEMM [rows, *] x [*, n] that could be asked for would find no room beside others
  // that are under way on this rank's device, or may be; empty where it would. Rows are of all ranks. It is
  // asked for all the same where the caller insists, and then waits for them, or cannot be captured.
  virtual std::string why_crowded(int64_t rows, int64_t n) const = 0;
  // Whether what the caller's stream is given goes into a graph, and does not run now.
  virtual bool is_capturing() const = 0;

  // Ops that would have been fused and were not, as why_crowded() said.
  struct Crowding {
    int64_t ops = 0;
    std::string why;  // of the last one
  };
  // Whether why_crowded() says nothing; otherwise the op is counted.
  bool makes_room_for(int64_t rows, int64_t n);
  Crowding crowding(int64_t rows, int64_t n) const;

 private:
  std::map<std::pair<int64_t, int64_t>, Crowding> crowding_;  // by rows and n
};

}  // namespace pyruntime
