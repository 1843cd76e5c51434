// Helpers of the kernel tests in the host dialect: memory that forked ranks share, workspaces in it, random
// numbers and GEMMs in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "core/chunk_plan.h"
#include "cuda/launchers.h"
#include "cuda/portable/numbers.cuh"
#include "grid.h"

namespace kernels {

using pyruntime::portable::Bf16;
using pyruntime::portable::Fp16;
using pyruntime::portable::to_float;

constexpr int64_t kSecond = 1'000'000'000;

inline void nap_ms(long ms) {
  const timespec time{ms / 1000, ms % 1000 * 1'000'000};
  nanosleep(&time, nullptr);
}

#define EXPECT_OK(call)                                                                        \
  check::equal(__FILE__, __LINE__, #call, std::string((call) == 0 ? "ok" : pyruntime_error()), \
               std::string("ok"))

// A fresh seed in every run, drawn before any rank is forked, so that all ranks have it.
inline const uint64_t kSeed = [] {
  const uint64_t drawn = std::random_device{}();
  std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(drawn));
  return drawn;
}();

template <class T>
constexpr int dtype_of() {
  return std::is_same_v<T, Bf16> ? PYRUNTIME_BF16 : std::is_same_v<T, Fp16> ? PYRUNTIME_FP16 : PYRUNTIME_FP32;
}

// Returns random values, the same on every rank for the same seed.
template <class T>
std::vector<T> random_values(int64_t count, uint64_t seed) {
  std::mt19937_64 draw(kSeed + seed * 7919);
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) value = pyruntime::portable::round_to<T>(normal(draw));
  return values;
}

inline int64_t random_size(std::mt19937_64& draw, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(draw);
}

template <class T>
std::vector<T> poison(int64_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memset(static_cast<void*>(values.data()), 0xff, count * sizeof(T));  // NaNs
  return values;
}

// C in fp64, of operands in a PyruntimeLayout.
struct Reference {
  std::vector<double> c, size;  // size: sum of |a b|, which bounds the rounding of sums
};

template <class T>
Reference product(int layout, int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b,
                  int64_t ldb) {
  std::vector<float> left(m * k), right(n * k);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t e = 0; e < k; ++e) left[i * k + e] = to_float(a[i * lda + e]);
  }
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t e = 0; e < k; ++e)
      right[j * k + e] = to_float(layout == PYRUNTIME_NT ? b[j * ldb + e] : b[e * ldb + j]);
  }
  Reference reference{std::vector<double>(m * n), std::vector<double>(m * n)};
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, size = 0;
      for (int64_t e = 0; e < k; ++e) {
        const double one = static_cast<double>(left[i * k + e]) * right[j * k + e];
        sum += one;
        size += std::fabs(one);
      }
      reference.c[i * n + j] = sum;
      reference.size[i * n + j] = size;
    }
  }
  return reference;
}

// Relative error of one rounding to T.
template <class T>
constexpr double unit() {
  return std::is_same_v<T, Bf16> ? 1.0 / 256 : std::is_same_v<T, Fp16> ? 1.0 / 2048 : 1.0 / (1 << 24);
}

// Fails with the first element that is NaN or farther from `wanted` than `allowed`.
template <class T, class Wanted, class Allowed>
void expect_close(const char* what, const T* seen, int64_t pitch, int64_t rows, int64_t columns,
                  const Wanted& wanted, const Allowed& allowed) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const double value = to_float(seen[i * pitch + j]), want = wanted(i, j);
      if (std::fabs(value - want) <= allowed(i, j)) continue;
      check::fail(__FILE__, __LINE__,
                  std::string(what) + "[" + std::to_string(i) + ", " + std::to_string(j) + "] is " +
                      std::to_string(value) + ", expected " + std::to_string(want));
      return;
    }
  }
}

// Memory that all ranks forked later share at the same address: a memfd, as on the CPU path.
class SharedMemory {
 public:
  explicit SharedMemory(int64_t bytes) : bytes_(bytes) {
    const int file = memfd_create("pyruntime_test", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes) != 0) std::abort();
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (data_ == MAP_FAILED) std::abort();
  }
  ~SharedMemory() { munmap(data_, bytes_); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_;
  int64_t bytes_;
};

// The workspaces of all ranks of a group, poisoned and then prepared.
class Workspaces {
 public:
  explicit Workspaces(const PyruntimeWorkspace& shape)
      : shape_(shape), stride_(pyruntime_workspace_bytes(&shape)), memory_(stride_ * shape.world_size) {
    std::memset(memory_.data(), 0xff, stride_ * shape.world_size);
    for (int rank = 0; rank < shape.world_size; ++rank) {
      bases_.push_back(memory_.data() + rank * stride_);
      EXPECT_OK(pyruntime_prepare_workspace(&shape_, bases_.back(), nullptr));
    }
  }

  PyruntimeGroup group(int rank, int slot = 0, int64_t deadline_ns = 20 * kSecond) const {
    return {shape_, rank, slot, deadline_ns, bases_.data(), /*pieces=*/0, /*rings=*/0, nullptr};
  }
  const PyruntimeWorkspace& shape() const { return shape_; }

 private:
  PyruntimeWorkspace shape_;
  int64_t stride_;
  SharedMemory memory_;
  std::vector<void*> bases_;
};

inline PyruntimeFailure failure_of(const PyruntimeGroup& group) {
  PyruntimeFailure failure{};
  EXPECT_OK(pyruntime_failure(&group, &failure, nullptr));
  return failure;
}

inline std::string description(const PyruntimeFailure& failure) {
  char text[256];
  EXPECT_OK(pyruntime_describe_failure(&failure, text, sizeof(text)));
  return text;
}

// The pitch of rows that travel: a multiple of 8 elements.
inline int64_t padded(int64_t width) {
  return (width + 7) / 8 * 8;
}

// Runs a plain GEMM: a gather in a group of one rank.
inline int multiply_alone(const PyruntimeMatmul& matmul) {
  const Workspaces workspaces({1, 1, 2 * matmul.m * padded(matmul.k)});
  const PyruntimeGroup group = workspaces.group(0);
  return pyruntime_all_gather_matmul(&group, &matmul, nullptr);
}

}  // namespace kernels
