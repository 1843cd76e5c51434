#include "sim/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <map>
#include <mutex>

namespace sim {

DeviceGenerator::DeviceGenerator(int device)
    : GeneratorImpl(c10::Device(device_type(), device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void DeviceGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t DeviceGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void DeviceGenerator::set_state(const c10::TensorImpl& state) {
  uint64_t words[2];
  TORCH_CHECK(state.numel() == sizeof(words), "The state of a generator of sim is ", sizeof(words),
              " bytes.");
  std::memcpy(words, state.data(), sizeof(words));
  seed_ = words[0];
  offset_ = words[1];
}

c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  const uint64_t words[2] = {seed_, offset_};
  at::Tensor state = at::empty({sizeof(words)}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), words, sizeof(words));
  return state.getIntrusivePtr();
}

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* made = new DeviceGenerator(device().index());
  made->seed_ = seed_;
  made->offset_ = offset_;
  return made;
}

at::Generator DeviceGenerator::next() {
  uint64_t mixed = (seed_ ^ 0x9e3779b97f4a7c15u) + 0xbf58476d1ce4e5b9u * ++offset_;  // as splitmix64 does
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

const at::Generator& default_generator(int device) {
  static auto* mutex = new std::mutex();
  static auto* all = new std::map<int, at::Generator>();
  const std::lock_guard<std::mutex> lock(*mutex);
  auto found = all->find(device);
  if (found == all->end()) found = all->emplace(device, new_generator(device)).first;
  return found->second;
}

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device);
}

}  // namespace sim
