// Memory private to this process that is kept from flight to flight and only grows.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace pyruntime {

class Scratch {
 public:
  // Makes room for `bytes`. The contents become undefined, and old pointers invalid.
  char* claim(int64_t bytes) {
    constexpr int64_t kAlignment = 4096;
    if (bytes > bytes_) {
      const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      bytes_ = 0;
      memory_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(size))));
      TORCH_CHECK(memory_ != nullptr, "There is no memory for a workspace of ", size, " bytes.");
      bytes_ = size;
    }
    return memory_.get();
  }
  char* get() const { return memory_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, &std::free};
  int64_t bytes_ = 0;
};

}  // namespace pyruntime
