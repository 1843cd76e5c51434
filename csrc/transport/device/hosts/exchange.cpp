#include "transport/device/hosts/exchange.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "core/deadline.h"
#include "transport/account.h"
#include "transport/device/block_budget.h"
#include "transport/device/hosts/pairs.h"
#include "transport/flights.h"

namespace pyruntime {

namespace {

// The bits of a tag: its flight, its step in the flight, and above these the group's instance.
constexpr int kFlightBits = 8;
constexpr int kStepBits = 12;
constexpr int kInstances = 1 << (31 - kFlightBits - kStepBits);

}  // namespace

std::unique_ptr<Exchange> Exchange::make(GroupContext& context,
                                         c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                         c10::Device device, int instance, const std::string& pair,
                                         std::string& why_not) {
  const auto backend_of = [&](c10d::ProcessGroup& group) { return group.getBackend(device.type()); };
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = backend_of(*process_group);
  } catch (const c10::Error&) {
    why_not = "its process group has no backend for " + device.str() + " tensors; " +
              "initialize it with 'cpu:gloo,cuda:nccl'";
    return nullptr;
  }
  if (!device.is_cpu() && !backend->supportsCoalescing()) {
    why_not =
        "its ranks are on several hosts, and " + backend->getBackendName() +
        " does not send in the order of streams; initialize the process group with 'cpu:gloo,cuda:nccl'";
    return nullptr;
  }
  Link link{process_group, context.process_group_ranks, process_group.get()};
  if (!device.is_cpu() && !pair.empty()) {
    // Another address, which lives as long.
    link = {make_pair(pair, context, device), {0, 1}, backend.get()};
    backend = backend_of(*link.process_group);
  }
  return std::make_unique<Exchange>(context, std::move(link), std::move(backend), device, instance);
}

Exchange::Exchange(GroupContext& context, Link link, c10::intrusive_ptr<c10d::Backend> backend,
                   c10::Device device, int instance)
    : context_(context),
      link_(std::move(link)),
      backend_(std::move(backend)),
      device_(device),
      instance_(instance) {
  if (!device_.is_cpu()) BlockBudget::of(device_).leave_room(link_.with_room);
}

Exchange::~Exchange() {
  if (!device_.is_cpu()) BlockBudget::of(device_).no_room(link_.with_room);
}

std::shared_ptr<Step> Exchange::begin(uint64_t flight, const char* what,
                                      const std::vector<Passage>& passages) {
  const auto step = std::make_shared<Step>();
  step->begun_s = monotonic_seconds();
  for (const Passage& each : passages) {
    if (each.here.numel() > 0) step->receives_from.push_back(each.from);
    if (each.from_here.numel() > 0) step->sends_to.push_back(each.to);
  }
  if (step->receives_from.empty() && step->sends_to.empty()) return step;
  const bool together = backend_->supportsCoalescing();
  const auto add = [&](c10::intrusive_ptr<c10d::Work> work) {
    if (!together) step->works.push_back(std::move(work));
  };
  try {  // gloo raises here if a connection is already closed
    if (together) backend_->startCoalescing();
    for (const Passage& each : passages) {
      const int tag =
          static_cast<int>((static_cast<int64_t>(instance_ % kInstances) << (kFlightBits + kStepBits)) |
                           (flight % (1 << kFlightBits)) << kStepBits | each.index);
      if (each.here.numel() > 0) {
        std::vector<at::Tensor> tensors{each.here};
        add(backend_->recv(tensors, link_.ranks.at(each.from), tag));
      }
      if (each.from_here.numel() > 0) {
        std::vector<at::Tensor> tensors{each.from_here};
        add(backend_->send(tensors, link_.ranks.at(each.to), tag));
      }
    }
    if (together) step->works.push_back(backend_->endCoalescing());
  } catch (const std::exception& error) {
    raise(*step, what, error.what());
  }
  return step;
}

void Exchange::await(Step& step, const char* what) {
  if (std::exchange(step.is_awaited, true)) return;
  for (const auto& work : step.works) {
    try {
      const int peer = step.receives_from.size() == 1 ? step.receives_from.front() : -1;
      const Spending waiting(context_, Entered::kWait, what, peer, device_);
      if (device_.is_cpu()) {
        work->wait(milliseconds(context_.deadline_seconds));
      } else {
        work->wait();
      }
    } catch (const std::exception& error) {
      raise(step, what, error.what());
    }
  }
}

void Exchange::follow(Step& step, const char* what) {
  if (device_.is_cpu()) return await(step, what);
  for (const auto& work : step.works) work->wait();
}

void Exchange::end(const std::vector<std::shared_ptr<Step>>& steps, const char* what) {
  for (const std::shared_ptr<Step>& step : steps) {
    if (step == nullptr) continue;
    await(*step, what);
    // Streams wait forever: a step that has not ended after the deadline will not end.
    if (device_.is_cpu() || monotonic_seconds() - step->begun_s < context_.deadline_seconds) continue;
    for (const auto& work : step->works) {
      if (!work->isCompleted()) raise(*step, what, "it is still under way");
    }
  }
}

std::string Exchange::names_of(const std::vector<int>& ranks) const {
  constexpr size_t kMost = 4;
  std::string names;
  for (size_t i = 0; i < std::min(kMost, ranks.size()); ++i) {
    names += (i > 0 ? ", " : "") + context_.name_of(ranks[i]);
  }
  return ranks.size() <= kMost ? names : names + " and " + std::to_string(ranks.size() - kMost) + " more";
}

void Exchange::raise(const Step& step, const char* what, const std::string& why) {
  const double waited = monotonic_seconds() - step.begun_s;
  std::ostringstream text;
  text << "group '" << context_.name << "' on " << device_ << ", " << context_.own_name() << ": " << what
       << " waited " << waited << " s for";
  if (!step.receives_from.empty()) text << " rows of " << names_of(step.receives_from);
  if (!step.receives_from.empty() && !step.sends_to.empty()) text << " and";
  if (!step.sends_to.empty()) text << " " << names_of(step.sends_to) << " to take its rows";
  text << " over " << backend_->getBackendName() << ": " << why;
  context_.link_is_broken = true;
  const bool late = waited >= 0.9 * context_.deadline_seconds;
  raise_for_all(failure_of(context_, late ? CommErrorKind::kTimeout : CommErrorKind::kPeerLost, text.str()));
}

void FlightSteps::claim(Exchange& exchange, Op op, uint64_t number) {
  end();
  steps_.clear();
  exchange_ = &exchange;
  op_ = op;
  number_ = number;
}

void FlightSteps::begin(const std::vector<Passage>& passages) {
  const auto step = exchange_->begin(number_, name_of(op_), passages);
  for (const Passage& each : passages) {
    steps_.resize(std::max<size_t>(steps_.size(), each.index + 1));
    steps_[each.index] = step;
  }
}

Step& FlightSteps::step(int index) {
  TORCH_CHECK(index < static_cast<int>(steps_.size()) && steps_[index] != nullptr, "A chunk of ",
              name_of(op_), " is waited for before this rank has published its own.");
  return *steps_[index];
}

}  // namespace pyruntime
