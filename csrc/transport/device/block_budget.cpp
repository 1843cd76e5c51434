#include "transport/device/block_budget.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace pyruntime {

namespace {

struct Budgets {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, BlockBudget> of_devices;
};

Budgets& budgets() {
  static auto* instance = new Budgets();  // never destroyed: groups may outlive static destructors
  return *instance;
}

// The kernels for Hopper come in clusters of two, each within one GPC, and a device has eight GPCs: beside
// other kernels, each may leave one multiprocessor unused.
constexpr int kLeftOver = 8;

int beside(int held, int all) {
  return held > 0 ? all - held - kLeftOver : all;
}

// NCCL's own limit; 0 without one.
int most_blocks_of_nccl() {
  const char* text = std::getenv("NCCL_MAX_CTAS");
  return text == nullptr ? 0 : std::max(0, std::atoi(text));
}

}  // namespace

BlockBudget& BlockBudget::of(c10::Device device) {
  auto& [mutex, of_devices] = budgets();
  const std::lock_guard<std::mutex> lock(mutex);
  return of_devices.try_emplace({device.type(), device.index()}, device).first->second;
}

// With NCCL_MAX_CTAS set, NCCL counts as at work, even without a group of ours.
int BlockBudget::all(const Launch& launch) const {
  const int limit = most_blocks_of_nccl();
  const std::set<const void*> groups(with_room_.begin(), with_room_.end());
  const int at_once = std::max(static_cast<int>(groups.size()), limit > 0 ? 1 : 0);
  return std::max(1, beside(at_once * (limit > 0 ? limit : kBlocksOfNccl), launch.multiprocessors - kSpare));
}

int BlockBudget::needed(const Launch& launch) const {
  return std::clamp(launch.blocks, 1, all(launch));
}

BlockBudget::Held BlockBudget::held(const Launch& launch) {
  Held held{};
  // Querying an event would end a capture. Whatever runs on streams before has ended by the time its graph is
  // replayed.
  if (!launch.is_captured) {
    std::erase_if(running_, [](const auto& stream) { return stream.second.ended.query(); });
    for (const auto& [stream, running] : running_) {
      if (stream != launch.stream.id()) held.by_streams += running.blocks;
    }
  }
  std::map<c10::StreamId, int> by_graphs;
  for (const auto& [whose, blocks] : captured_) {
    by_graphs[whose.second] = std::max(by_graphs[whose.second], blocks);
  }
  for (const auto& [stream, blocks] : by_graphs) {
    if (!launch.is_captured || stream != launch.stream.id()) held.by_graphs += blocks;
  }
  return held;
}

std::string BlockBudget::crowd(const Launch& launch, const Held& held) const {
  if (2 * beside(held.by_streams + held.by_graphs, all(launch)) >= needed(launch)) return "";
  const auto count = [](int blocks, const char* how) {
    return blocks > 0 ? c10::str(", ", blocks, how) : std::string();
  };
  return c10::str("of the ", all(launch), " blocks of fused kernels that ", device_,
                  " has room for at one time", count(held.by_streams, " are under way on other streams"),
                  count(held.by_graphs, " are held by captured graphs, which may be replayed at any time"));
}

std::string BlockBudget::why_crowded(const Launch& launch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return crowd(launch, held(launch));
}

void BlockBudget::wait(const Launch& launch, const Held& held) const {
  if (held.by_graphs > 0 && has_streams()) {
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  }
  for (const auto& [stream, running] : running_) {
    if (stream != launch.stream.id()) running.ended.block(launch.stream);
  }
}

void BlockBudget::keep(const Launch& launch, int blocks) {
  if (launch.is_captured) {
    int& most = captured_[{launch.owner, launch.stream.id()}];
    most = std::max(most, blocks);
  } else if (has_streams()) {
    Running& running = running_.try_emplace(launch.stream.id(), device_.type()).first->second;
    running.blocks = std::max(running.blocks, blocks);
    running.ended.record(launch.stream);
  }
}

void BlockBudget::put(const Launch& launch, const std::function<void(int blocks)>& put) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Held held = this->held(launch);
  const std::string crowded = crowd(launch, held);
  TORCH_CHECK_VALUE(crowded.empty() || !launch.is_captured,
                    "A fused kernel cannot be captured now: ", crowded,
                    ". Capture fused ops on one stream, or with tier='chunked'.");
  int blocks = needed(launch);
  if (crowded.empty()) {
    blocks = std::min(blocks, beside(held.by_streams + held.by_graphs, all(launch)));
  } else {
    wait(launch, held);
  }
  // Nobody may take the same blocks before this launch is on its stream. Without streams it has ended when
  // `put` returns, and others must not wait for that.
  if (!has_streams()) lock.unlock();
  put(blocks);
  if (!has_streams()) lock.lock();
  keep(launch, blocks);
}

void BlockBudget::forget(const void* owner) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(captured_, [&](const auto& one) { return one.first.first == owner; });
}

void BlockBudget::leave_room(const void* process_group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  with_room_.insert(process_group);
}

void BlockBudget::no_room(const void* process_group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  with_room_.erase(with_room_.find(process_group));
}

}  // namespace pyruntime
