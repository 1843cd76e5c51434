#include "transport/device/hosts/pairs.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <utility>

namespace pyruntime {

namespace {

PairMaker& maker() {
  static auto* instance = new PairMaker();
  return *instance;
}

}  // namespace

void set_pair_maker(PairMaker made) {
  maker() = std::move(made);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_pair(const std::string& name, const GroupContext& context,
                                                 c10::Device device) {
  maker()(name, context, device);
  return c10d::resolve_process_group(name);
}

}  // namespace pyruntime
