// Numbers, memory with guard bytes around it, and comparisons. Nothing of the kernels' own arithmetic is
// used.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/launchers.h"
#include "device.h"

namespace run {

struct Bf16 {
  uint16_t bits;
};

struct Fp16 {
  uint16_t bits;
};

inline double value(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline double value(Fp16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const double size = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return (x.bits & 0x8000) != 0 ? -size : size;
}

inline double value(float x) {
  return x;
}

// To the nearest, ties to even.
template <class T>
T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, Bf16>) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const uint32_t up = 0x7fff + (bits >> 16 & 1);
    return {static_cast<uint16_t>(std::isnan(x) ? 0x7fc0 : (bits + up) >> 16)};
  } else {
    const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
    const double size = std::fabs(x);
    if (std::isnan(x)) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (size == 0) return {sign};
    if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
    int exponent = 0;
    std::frexp(size, &exponent);
    const int last_bit = (exponent < -13 ? -13 : exponent) - 11;
    const auto fraction = static_cast<int>(std::nearbyint(std::ldexp(size, -last_bit)));
    return {static_cast<uint16_t>(sign | (((last_bit + 24) << 10) + fraction))};
  }
}

template <class T>
constexpr int dtype_of() {
  return std::is_same_v<T, Bf16> ? PYRUNTIME_BF16 : std::is_same_v<T, Fp16> ? PYRUNTIME_FP16 : PYRUNTIME_FP32;
}

// Relative error of one rounding to T.
template <class T>
constexpr double unit() {
  return std::is_same_v<T, Bf16> ? 1.0 / 256 : std::is_same_v<T, Fp16> ? 1.0 / 2048 : 1.0 / (1 << 24);
}

extern uint64_t seed;  // of this run; drawn before any rank begins, so that all have the same

// The same for the same number on every rank.
template <class T>
std::vector<T> random_values(int64_t count, uint64_t number) {
  std::mt19937_64 draw(seed + number * 7919);
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& one : values) one = rounded<T>(normal(draw));
  return values;
}

[[noreturn]] inline void fail(const std::string& message) {
  throw std::runtime_error(message);
}

inline void require(bool holds, const std::string& message) {
  if (!holds) fail(message);
}

// Of a call of the library.
inline void ok(int code) {
  if (code != PYRUNTIME_OK) fail(pyruntime_error());
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

constexpr unsigned char kPoison = 0xff;  // NaNs of every type
constexpr unsigned char kGuard = 0x5a;
constexpr int64_t kGuardBytes = 512;

// `bytes` of a device's memory, guards around them. Who writes outside of them fails the case.
struct Guarded {
  static void fill(unsigned char* whole, int64_t bytes) {
    const std::vector<unsigned char> guard(kGuardBytes, kGuard);
    device::copy(whole, guard.data(), kGuardBytes);
    device::copy(whole + kGuardBytes + bytes, guard.data(), kGuardBytes);
  }
  static void check(const unsigned char* whole, int64_t bytes) {
    std::vector<unsigned char> guard(kGuardBytes);
    for (const int64_t at : {int64_t{0}, kGuardBytes + bytes}) {
      device::copy(guard.data(), whole + at, kGuardBytes);
      for (int64_t i = 0; i < kGuardBytes; ++i) {
        if (guard[i] == kGuard) continue;
        fail("byte " + std::to_string(at + i - kGuardBytes) + " of " + std::to_string(bytes) +
             " was written, which is outside");
      }
    }
  }
};

// Elements in a device's memory, the first of them `shift` elements behind a multiple of 256 bytes. It is
// given back when the process ends, which is its case's: hipFree() waits for all streams of a device, other
// ranks' among them, whose kernels wait for this rank.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count, int64_t shift = 0)
      : count_(count), first_(static_cast<unsigned char*>(device::allocate(bytes(shift) + 2 * kGuardBytes))) {
    first_ += shift * static_cast<int64_t>(sizeof(T));
    Guarded::fill(first_, bytes(0));
    poison();
  }
  explicit Buffer(const std::vector<T>& values, int64_t shift = 0)
      : Buffer(static_cast<int64_t>(values.size()), shift) {
    write(values);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return reinterpret_cast<T*>(first_ + kGuardBytes); }

  void poison() {
    const std::vector<unsigned char> nothing(bytes(0), kPoison);
    device::copy(data(), nothing.data(), nothing.size());
  }
  void write(const std::vector<T>& values) { device::copy(data(), values.data(), bytes(0)); }

  // When what was put on `stream` has ended, which pyruntime_failure() or wait() sees to; checks the guards.
  std::vector<T> read() const {
    Guarded::check(first_, bytes(0));
    std::vector<T> values(count_);
    device::copy(values.data(), data(), bytes(0));
    return values;
  }

 private:
  int64_t bytes(int64_t shift) const { return (count_ + shift) * static_cast<int64_t>(sizeof(T)); }

  int64_t count_;
  unsigned char* first_;  // of the guard before them
};

template <class T>
bool is_poison(const T& one) {
  unsigned char bits[sizeof(T)];
  std::memset(bits, kPoison, sizeof(T));
  return std::memcmp(&one, bits, sizeof(T)) == 0;
}

// Every element within allowed(i, j) of wanted(i, j), and what lies between the rows left alone.
template <class T, class Wanted, class Allowed>
void expect_close(const std::string& what, const std::vector<T>& seen, int64_t rows, int64_t columns,
                  int64_t pitch, const Wanted& wanted, const Allowed& allowed) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const double found = value(seen[i * pitch + j]), want = wanted(i, j);
      if (found == want || std::fabs(found - want) <= allowed(i, j)) continue;
      fail(what + "[" + std::to_string(i) + ", " + std::to_string(j) + "] is " + std::to_string(found) +
           ", expected " + std::to_string(want));
    }
    for (int64_t j = columns; j < pitch && i * pitch + j < static_cast<int64_t>(seen.size()); ++j) {
      require(is_poison(seen[i * pitch + j]),
              what + ": an element behind row " + std::to_string(i) + " was written");
    }
  }
}

}  // namespace run
