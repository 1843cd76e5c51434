#include "transport/ring/receiver.h"

#include <exception>
#include <string>

#include "core/arbiter.h"
#include "core/host_process.h"
#include "core/text.h"
#include "transport/ring/sender.h"

namespace pyruntime {

Receiver::Receiver(int peer, FlightSlots& slots, Control& control, Health& health, Arbiter& arbiter)
    : peer_(peer), slots_(slots), control_(control), health_(health), arbiter_(arbiter) {
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "pyr-receive");
}

void Receiver::post(RingFlight& flight, const RingParts& parts) {
  for (auto& stream : flight.streams()) {
    const int peer = parts.layout.on_rail(stream->stream.upstream);
    for (size_t i = 0; i < stream->receives.size(); ++i) {
      const Hop& hop = stream->receives[i];
      stream->receiving[i] = parts.link->receive(
          hop.memory, hop.bytes, peer, tag_of(parts.instance, flight.number(), stream->stream.index, i));
    }
  }
}

void Receiver::notice(const ControlMessage& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  notices_.push_back(message);
  noticed_.notify_one();
}

Receiver::~Receiver() {
  if (thread_.joinable()) stop();
}

bool Receiver::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (current_) {
      was_cut_off_ = true;
      try {
        current_->abort();
      } catch (const std::exception&) {
        // Some backends cannot abort; then the wait ends with the connection.
      }
    }
  }
  noticed_.notify_all();
  thread_.join();
  return was_cut_off_;
}

void Receiver::run() {
  make_this_thread_prompt();
  while (true) {
    ControlMessage notice;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      noticed_.wait(lock, [&] { return stopping_ || !notices_.empty(); });
      if (stopping_) return;
      notice = notices_.front();
      notices_.pop_front();
    }
    if (!receive(notice)) return;
  }
}

// Returns false if nothing more can come.
bool Receiver::receive(const ControlMessage& notice) {
  const std::shared_ptr<RingFlight> flight = slots_.find(notice.flight);
  StreamState* stream = nullptr;
  PendingTransfer pending;
  if (flight && notice.stream < static_cast<int>(flight->streams().size())) {
    stream = flight->streams()[notice.stream].get();
    if (notice.index < stream->receives.size()) pending = std::move(stream->receiving[notice.index]);
  }
  if (!pending) {
    health_.lose(peer_, "announced a chunk that this rank does not expect");
    return false;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) {
      was_cut_off_ = true;
      return false;
    }
    current_ = pending;
  }
  bool arrived = false;
  const double begin = monotonic_seconds();
  std::string problem;
  try {
    arrived = pending->wait(kNever);
  } catch (const std::exception& error) {
    problem = first_line(error.what());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    current_.reset();
    if (stopping_) return false;
  }
  if (!arrived) {
    health_.lose(peer_, "broke off while it sent: " + problem);
    return false;
  }
  const Hop& hop = stream->receives[notice.index];
  const double end = monotonic_seconds();
  enter_transfer(Entered::kArrived, control_.context(), flight->announced().op, peer_, hop.bytes, begin, end);
  stream->travelled[notice.index] = {peer_, notice.left, end};
  stream->arrived[notice.index].store(true, std::memory_order_release);
  flight->announce(hop);
  control_.tell(peer_, {ControlMessage::kArrived, stream->stream.index, flight->number(), notice.index});
  arbiter_.wake();
  return true;
}

}  // namespace pyruntime
