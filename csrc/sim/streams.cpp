#include "sim/streams.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "sim/memory.h"

namespace sim {

namespace {

constexpr int kPool = 32;
constexpr int kPooled = 1 + 2 * kPool;  // of a device: the default one, and a pool for each priority

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The state of all devices of this process. Everything here lives to the end of the process: threads may
// still use it when static objects are destroyed.
struct Process {
  std::mutex mutex;
  std::string broken;
  std::map<std::string, int64_t> waits, launches;
  std::vector<std::map<int64_t, std::unique_ptr<Queue>>> queues;  // by device and stream
};

Process& process() {
  static auto* instance = new Process();
  return *instance;
}

thread_local int device_of_thread = 0;
thread_local std::map<int, int64_t> stream_of_thread;  // by device

void check_device(int device) {
  TORCH_CHECK(0 <= device && device < settings().devices, "sim:", device, " was asked for, and there are ",
              settings().devices, " devices.");
}

Queue& queue_of(int device, int64_t id) {
  check_device(device);
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.queues.empty()) all.queues.resize(settings().devices);
  auto& found = all.queues.at(device)[id];
  if (!found) found = std::make_unique<Queue>(device, id);
  return *found;
}

void break_device(const std::string& why) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.broken.empty()) all.broken = why;
}

bool is_broken() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return !all.broken.empty();
}

}  // namespace

Settings& settings() {
  static auto* instance = new Settings();
  return *instance;
}

void raise_if_broken() {
  Process& all = process();
  std::string why;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    why = all.broken;
  }
  TORCH_CHECK(why.empty(), "The simulated device has failed: ", why);
}

void HostWaits::count(const std::string& why) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  ++all.waits[why];
}

std::map<std::string, int64_t> HostWaits::counted() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.waits;
}

void HostWaits::reset() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.waits.clear();
}

std::map<std::string, int64_t> launches() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.launches;
}

void reset_launches() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.launches.clear();
}

Queue::Queue(int device, int64_t id) : device_(device), id_(id), timeline_(id) {
  if (!Clock::is_on()) std::thread([this] { work(); }).detach();
}

void Queue::enqueue(Task task) {
  {
    Process& all = process();
    const std::lock_guard<std::mutex> lock(all.mutex);
    ++all.launches[task.name];
  }
  if (Clock::is_on()) return timeline_.work(task.name, task.work);
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  ++enqueued_;
  changed_.notify_all();
}

bool Queue::is_empty() {
  if (Clock::is_on()) return timeline_.done() <= Clock::instance().host();
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ == enqueued_;
}

uint64_t Queue::enqueued() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

void Queue::drain() {
  if (Clock::is_on()) return Clock::instance().host_until(timeline_.done());
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&, until = enqueued_] { return done_ >= until; });
}

void Queue::synchronize() {
  drain();
  raise_if_broken();
}

void Queue::work() {
  open_device_memory();
  std::mt19937_64 random(settings().delays * 0x9e3779b97f4a7c15u + device_ * 1009 + id_);
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (settings().delays != 0) {
      // Often a little; rarely so long that other streams are several operations ahead.
      const uint64_t drawn = random(), longest = settings().longest_delay_us;
      const uint64_t us = drawn % 64 == 0 ? 10 * longest : drawn % 4 == 0 ? (drawn >> 8) % (longest + 1) : 0;
      if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    // Names in brackets are of the streams' own bookkeeping, which has to go on.
    if (task.name.front() == '(' || !is_broken()) {
      try {
        task.run();
      } catch (const c10::Error& error) {
        break_device(task.name + ": " + error.what_without_backtrace());
      } catch (const std::exception& error) {
        break_device(task.name + ": " + error.what());
      }
    }
    task = {};
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

std::shared_ptr<Event::Recording> Event::last() {
  const std::lock_guard<std::mutex> lock(*mutex_);
  return *last_;
}

bool Event::Recording::is_over() {
  const std::lock_guard<std::mutex> lock(mutex);
  return Clock::is_on() ? seconds <= Clock::instance().host() : has_happened;
}

void Event::Recording::wait() {
  if (Clock::is_on()) return Clock::instance().host_until(seconds);
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return has_happened; });
}

void Event::record(Queue& stream) {
  const auto made = std::make_shared<Recording>();
  {
    const std::lock_guard<std::mutex> lock(*mutex_);
    *last_ = made;
  }
  if (Clock::is_on()) {
    Clock::instance().call("event");
    made->seconds = stream.timeline().done();
    made->after = stream.timeline().last();
    return;
  }
  stream.enqueue({"(record)", [made] {
                    const std::lock_guard<std::mutex> lock(made->mutex);
                    made->has_happened = true;
                    made->seconds = now_s();
                    made->changed.notify_all();
                  }});
}

void Event::block(Queue& stream, bool may_drop) {
  const auto recording = last();
  if (recording == nullptr || (may_drop && Faults::drops())) return;
  if (Clock::is_on()) return stream.timeline().until(recording->seconds, recording->after);
  stream.enqueue({"(wait)", [recording] { recording->wait(); }});
}

bool Event::has_happened() {
  const auto recording = last();
  return recording == nullptr || recording->is_over();
}

void Event::synchronize() {
  if (const auto recording = last()) recording->wait();
  raise_if_broken();
}

double Event::since(Event& first) {
  const auto begun = first.last(), ended = last();
  TORCH_CHECK(begun && ended && first.has_happened() && has_happened(),
              "An event of the two was not recorded, or has not happened yet.");
  return (ended->seconds - begun->seconds) * 1e3;
}

int current_device() {
  return device_of_thread;
}

void set_current_device(int device) {
  check_device(device);
  device_of_thread = device;
}

Queue& queue(const c10::Stream& stream) {
  return queue_of(stream.device_index(), stream.id());
}

c10::Stream current_stream(int device) {
  const auto found = stream_of_thread.find(device);
  const int64_t id = found == stream_of_thread.end() ? 0 : found->second;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

Queue& current_queue(int device) {
  return queue(current_stream(device));
}

void set_current_stream(const c10::Stream& stream) {
  stream_of_thread[stream.device_index()] = stream.id();
}

c10::Stream pool_stream(int device, bool urgent) {
  check_device(device);
  static std::atomic<int> next[2];
  const int64_t id = 1 + (urgent ? kPool : 0) + next[urgent]++ % kPool;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

c10::Stream own_stream(int device) {
  check_device(device);
  static std::atomic<int64_t> next{kPooled};
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), next++);
}

void synchronize_device(int device) {
  std::vector<Queue*> living;
  {
    Process& all = process();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.queues.empty()) return;
    for (const auto& [id, each] : all.queues.at(device)) {
      living.push_back(each.get());
    }
  }
  for (Queue* each : living) each->synchronize();
}

void enqueue(int device, std::string name, std::function<void()> run, Work work) {
  raise_if_broken();
  current_queue(device).enqueue({std::move(name), std::move(run), std::move(work)});
}

}  // namespace sim
