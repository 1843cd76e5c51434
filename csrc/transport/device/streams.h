// The streams of an op on a device: the caller's, and beside it one for moving rows and one for sums. On a
// device without streams (the CPU) everything happens at once and in order, and nothing here does anything.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

namespace pyruntime {

class DeviceStreams {
 public:
  // `ways`: the number of ways around rings.
  explicit DeviceStreams(c10::Device device, int ways = 0) : device_(device), guard_(device.type()) {
    if (!has_streams()) return;
    moving_ = take();
    for (int way = 0; way < ways; ++way) ways_.push_back(take());
  }

  c10::Stream current_stream() const { return guard_.getStream(device_); }
  // Streams in the form that the library's functions take.
  void* current() const { return has_streams() ? guard_.getStream(device_).native_handle() : nullptr; }
  void* moving() const { return has_streams() ? moving_->native_handle() : nullptr; }

  // Makes what the moving stream gets from now on wait for all that the caller's stream has so far.
  void move_after_current() const {
    if (!has_streams()) return;
    c10::Event event(device_.type());
    event.record(guard_.getStream(device_));
    event.block(*moving_);
  }
  // Each way around rings has a stream of its own: it uses other links and waits for other ranks.
  void* way(int way) const { return has_streams() ? ways_[way].native_handle() : nullptr; }
  void ways_after_current() const {
    if (!has_streams()) return;
    c10::Event event(device_.type());
    event.record(guard_.getStream(device_));
    for (const c10::Stream& way : ways_) event.block(way);
  }
  // Makes the first way wait for all that the other ways have so far.
  void join_ways() const {
    for (size_t way = 1; way < ways_.size(); ++way) {
      c10::Event event(device_.type());
      event.record(ways_[way]);
      event.block(ways_.front());
    }
  }
  // The work of the first way so far, for current_after().
  std::optional<c10::Event> first_way() const {
    if (!has_streams()) return std::nullopt;
    c10::Event event(device_.type());
    event.record(ways_.front());
    return event;
  }
  // The work of the moving stream so far, for current_after().
  std::optional<c10::Event> moved() const {
    if (!has_streams()) return std::nullopt;
    c10::Event event(device_.type());
    event.record(*moving_);
    return event;
  }
  void current_after(const std::optional<c10::Event>& event) const {
    if (event) event->block(guard_.getStream(device_));
  }
  // Makes the moving stream the current one within a scope.
  c10::OptionalStreamGuard on_moving() const {
    return has_streams() ? c10::OptionalStreamGuard(*moving_) : c10::OptionalStreamGuard();
  }
  // Makes the summing stream, which waits for all that the caller's stream has so far, the current one within
  // a scope.
  c10::OptionalStreamGuard on_summing() {
    if (!has_streams()) return c10::OptionalStreamGuard();
    if (!summing_) summing_ = take();
    c10::Event event(device_.type());
    event.record(guard_.getStream(device_));
    event.block(*summing_);
    return c10::OptionalStreamGuard(*summing_);
  }
  // The work of the current stream so far, for current_after().
  std::optional<c10::Event> done() const {
    if (!has_streams()) return std::nullopt;
    c10::Event event(device_.type());
    event.record(guard_.getStream(device_));
    return event;
  }
  // Waits on the host for all work of the device.
  void synchronize() const {
    if (has_streams()) guard_.synchronizeDevice(device_.index());
  }

 private:
  bool has_streams() const { return !device_.is_cpu(); }
  c10::Stream take() const { return guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true); }

  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  std::optional<c10::Stream> moving_, summing_;  // summing_: once somebody sums there
  std::vector<c10::Stream> ways_;
};

}  // namespace pyruntime
