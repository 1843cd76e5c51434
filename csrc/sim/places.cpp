#include "sim/places.h"

#include <ATen/record_function.h>

#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "sim/clock/clock.h"

namespace sim {

namespace {

struct Running {
  std::string op;
  std::optional<std::string> place;  // of the forward pass; none in a forward pass
};

thread_local std::vector<Running> running;

// Places of forward passes, by autograd's number of the operator, which its node has too.
struct Seen {
  std::mutex mutex;
  std::map<int64_t, std::string> places;
};

Seen& seen() {
  static auto* instance = new Seen();
  return *instance;
}

struct Pushed : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const std::string name = function.name();
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    Running made{name, std::nullopt};
    const std::lock_guard<std::mutex> lock(seen().mutex);
    if (const auto found = seen().places.find(function.seqNr()); found != seen().places.end()) {
      made.place = found->second;
    }
    running.push_back(std::move(made));
    return std::make_unique<Pushed>();
  }
  if (function.seqNr() >= 0 && running.empty()) {
    const std::lock_guard<std::mutex> lock(seen().mutex);
    seen().places.try_emplace(function.seqNr(), Clock::instance().place());
  }
  if (name.rfind("pyruntime::", 0) != 0) return nullptr;
  running.push_back({name.substr(11), running.empty() ? std::nullopt : running.back().place});
  return std::make_unique<Pushed>();
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context != nullptr && !running.empty()) running.pop_back();
}

}  // namespace

void watch_places() {
  at::addGlobalCallback(at::RecordFunctionCallback(&begin, &end)
                            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

std::string op_under_way(const std::string& place) {
  if (running.empty()) return place;
  return running.back().place.value_or(place) + ": " + running.back().op;
}

}  // namespace sim
