// Random numbers of the devices. As on CUDA the state is a seed and an offset, both the host's: an operation
// takes the next offset when it is enqueued, so what it draws does not depend on when it runs.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace sim {

class DeviceGenerator : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int device);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  // A generator of the CPU for one operation, which no other operation gets.
  at::Generator next();

 private:
  DeviceGenerator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

}  // namespace sim
