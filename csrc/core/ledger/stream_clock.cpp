#include "core/ledger/stream_clock.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/deadline.h"

namespace pyruntime {

namespace {

constexpr size_t kKept = size_t{1} << 19;  // the last points whose times stay known
constexpr double kRebaseSeconds = 1.0;     // CUDA tells the time between two events in fp32

// Older versions of torch do not say; then nobody captures with a watched stream.
template <typename Guard>
bool is_capturing(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) return guard.isStreamCapturing(stream);
  return false;
}

}  // namespace

StreamClock& StreamClock::instance() {
  static auto* clock = new StreamClock();  // never destroyed: the device may be gone by then
  return *clock;
}

void StreamClock::start(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  if (starts_ > 0) {
    TORCH_CHECK(*stream_ == stream, "Waits of ", *stream_, " are watched already, and ", stream,
                " was asked for; stop watching the first.");
    ++starts_;
    return;
  }
  guard_.emplace(device.type());
  stream_ = stream;
  pending_.clear();
  unused_.clear();
  waits_.clear();
  by_group_.clear();
  waited_ = 0;
  last_ = kNone;
  readings_.assign(kKept, {});
  base_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  guard_->synchronizeStream(stream);
  base_->record(stream);
  base_->synchronize();
  base_at_ = monotonic_seconds();
  starts_ = 1;
  on_ = true;
}

void StreamClock::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (starts_ == 0 || --starts_ > 0) return;
  on_ = false;
  settle(last_);
}

int64_t StreamClock::record() {
  if (!is_on() || guard_->getStream(stream_->device()) != *stream_ || is_capturing(*guard_, *stream_)) {
    return kNone;
  }
  if (unused_.empty()) unused_.emplace_back(stream_->device_type(), c10::EventFlag::BACKEND_DEFAULT);
  unused_.back().record(*stream_);
  pending_.push_back(std::move(unused_.back()));
  unused_.pop_back();
  return ++last_;
}

int64_t StreamClock::mark() {
  if (!is_on()) return kNone;
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t point = record();
  if (point != kNone) settle(kNone);
  return point;
}

int64_t StreamClock::mark_end_of_wait(int64_t begin, const std::string& group, const PeerKey& peer) {
  if (!is_on() || begin == kNone) return kNone;
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t end = record();
  if (end == kNone) return kNone;
  waits_.push_back({begin, end, group, peer});
  settle(kNone);
  return end;
}

bool StreamClock::has_passed(int64_t point) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle(kNone);
  return known(point) != nullptr;
}

std::vector<StreamClock::Reading> StreamClock::read(const std::vector<int64_t>& points) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t latest = kNone;
  for (const int64_t point : points) latest = std::max(latest, point);
  settle(std::min(latest, last_));
  std::vector<Reading> result;
  for (const int64_t point : points) {
    const Reading* found = known(point);
    result.push_back(found == nullptr ? Reading{kUnknown, kUnknown} : *found);
  }
  return result;
}

double StreamClock::waited_in(const std::string& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle(kNone);
  double seconds = 0;
  for (const auto& [of, waited] : by_group_) seconds += of.first == group ? waited : 0;
  return seconds;
}

std::map<TrafficClass, double> StreamClock::waited_by_class() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle(kNone);
  std::map<TrafficClass, double> result;
  for (const auto& [of, waited] : by_group_) result[of.second] += waited;
  return result;
}

void StreamClock::forget(const std::string& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(by_group_, [&](const auto& each) { return each.first.first == group; });
}

const StreamClock::Reading* StreamClock::known(int64_t point) const {
  const int64_t read = last_ - static_cast<int64_t>(pending_.size());
  const bool is_kept = point > kNone && point <= read && point + static_cast<int64_t>(kKept) > read;
  return is_kept ? &readings_[point % kKept] : nullptr;
}

void StreamClock::settle(int64_t until) {
  if (until > last_ - static_cast<int64_t>(pending_.size())) {
    pending_[pending_.size() - 1 - (last_ - until)].synchronize();
  }
  while (!pending_.empty() && pending_.front().query()) {
    const int64_t point = last_ - static_cast<int64_t>(pending_.size()) + 1;
    const double since = base_->elapsedTime(pending_.front()) * 1e-3, at = base_at_ + since;
    unused_.push_back(std::move(pending_.front()));
    pending_.pop_front();
    if (since > kRebaseSeconds) {
      std::swap(*base_, unused_.back());
      base_at_ = at;
    }
    if (!waits_.empty() && waits_.front().end == point) {
      const Wait& wait = waits_.front();
      const Reading* begin = known(wait.begin);
      const double seconds = begin == nullptr ? 0.0 : at - begin->at;
      waited_ += seconds;
      by_group_[{wait.group, wait.peer.traffic_class}] += seconds;
      if (wait.peer.rank >= 0) PeerTable::instance().waited(wait.peer, seconds);
      waits_.pop_front();
    }
    readings_[point % kKept] = {at, waited_};
  }
}

double moment(c10::Device device) {
  if (device.is_cpu()) return monotonic_seconds();
  return -static_cast<double>(StreamClock::instance().mark());
}

}  // namespace pyruntime
