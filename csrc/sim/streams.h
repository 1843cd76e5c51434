// The devices of this process: their streams, events and what the host has waited for.
//
// A stream is a thread with a queue. The host puts operations into the queue and goes on; the thread runs
// them in order. So an operation sees memory as it is when the device comes to it, not when the host asked
// for it.
//
// The first operation that fails breaks the device, as on CUDA: what is queued behind it is dropped, events
// are still recorded so that nothing hangs, and every later call of the host that waits or enqueues raises.
//
// In virtual time (clock.h) there are no threads, and nothing runs.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "sim/clock/clock.h"

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

struct Settings {
  int devices = 1;
  int64_t bytes = int64_t{1} << 34;  // of memory, on each device
  uint64_t delays = 0;               // a seed; 0: operations run as soon as they can
  int64_t longest_delay_us = 2000;
};
// To be changed before the first use of a device.
Settings& settings();

// An operation of a stream.
struct Task {
  std::string name;  // "aten::mm"
  std::function<void()> run;
  Work work = {};  // all that is done of it in virtual time
};

class Queue;

// Several recordings of one event are told apart, as CUDA does: who waits, waits for the last one before.
class Event {
 public:
  void record(Queue& stream);
  // Does nothing for an event that was never recorded. `may_drop`: the wait may be a fault that is planted.
  void block(Queue& stream, bool may_drop = true);
  bool has_happened();
  void synchronize();
  // Milliseconds from the last recording of `first`. Both have happened.
  double since(Event& first);

 private:
  // One recording. Who waits, waits for the one that was last when it was asked to.
  struct Recording {
    std::mutex mutex;
    std::condition_variable changed;
    bool has_happened = false;
    double seconds = 0;
    std::string after;  // in virtual time: what the stream did last

    void wait();
    bool is_over();
  };
  std::shared_ptr<Recording> last();

  std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  std::shared_ptr<std::shared_ptr<Recording>> last_ = std::make_shared<std::shared_ptr<Recording>>();
};

class Queue {
 public:
  Queue(int device, int64_t id);

  void enqueue(Task task);
  bool is_empty();
  // Waits, on the host. Raises what broke the device.
  void synchronize();
  // The same, whatever has become of the device.
  void drain();
  int device() const { return device_; }
  int64_t id() const { return id_; }
  uint64_t enqueued();
  Timeline& timeline() { return timeline_; }

 private:
  void work();

  const int device_;
  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t enqueued_ = 0, done_ = 0;
  Timeline timeline_;
};

int current_device();
void set_current_device(int device);
Queue& queue(const c10::Stream& stream);
Queue& current_queue(int device);
c10::Stream current_stream(int device);
void set_current_stream(const c10::Stream& stream);
// A stream of a pool of 32 for each priority: as on CUDA, the 33rd is the first again.
c10::Stream pool_stream(int device, bool urgent);
// A stream that nobody else gets.
c10::Stream own_stream(int device);
void synchronize_device(int device);
// Puts it on the device's current stream.
void enqueue(int device, std::string name, std::function<void()> run, Work work = {});

// Raises what broke the device, if something did.
void raise_if_broken();

// Times that the host waited for a device, by what made it wait: "synchronize", "aten::_local_scalar_dense",
// ...
struct HostWaits {
  static void count(const std::string& why);
  static std::map<std::string, int64_t> counted();
  static void reset();
};
// Operations enqueued so far, by name.
std::map<std::string, int64_t> launches();
void reset_launches();

// Faults that tests plant: what the product asks for at one place, a stream's or the host's wait for an event
// or a note that a stream uses a block, does not happen. A place is the innermost return address in the core,
// "core+4096", or else the innermost line of the package, "pyruntime/data_parallel/muon.py:154".
struct Faults {
  // Counts a request from the product, once drop() has been called, and says whether it is to be dropped.
  static bool drops();
  static std::map<std::string, int64_t> counted();
  static void drop(std::optional<std::string> place);  // and counts anew
};

}  // namespace sim
