// Virtual time, for devices that compute nothing. What the host asks of a stream takes the seconds that a
// model of the machine says and changes no memory; the order of the host's calls is an order in which devices
// can do the work, so one thread computes all times as it goes:
//
//   a call          host += the seconds of a call
//   an operation    stream = max(stream, host) + its seconds
//   an event        event = max(stream, host);  a stream that waits: stream = max(stream, event)
//   a host's wait   host = max(host, what it waits for)
//
// Every advance of a stream is one span, so a stream's spans cover its time without holes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

// A question to the model of the machine: the seconds of "gemm" with {m, n, k, ...}, "put" with {bytes}.
struct Work {
  std::string kind;  // empty: no time
  std::vector<int64_t> sizes;
};

enum class Spent { kWork = 0, kWait = 1, kHost = 2 };

// Consecutive seconds of a stream. A wait's `name` says what it waited for; kHost: the host had asked for
// nothing yet. `place`: where in the model the host was when it asked.
struct Span {
  int64_t stream;
  double begin, end;
  Spent spent;
  int name, place;  // numbers of Clock::text()
};

class Timeline;

// The clock of this process: the host's time, links, and what streams have spent.
class Clock {
 public:
  using Model = std::function<double(const std::string& kind, const std::vector<int64_t>& sizes)>;

  static Clock& instance();
  static bool is_on();

  // Begins at 0. The model is asked once for each kind and sizes. It may take Python's lock, so no lock of
  // ours is held then.
  void begin(Model model);
  double seconds(const Work& work);

  double host();
  void call(const char* kind);  // the host spends the seconds of "call" or "event"
  void host_until(double moment);

  // The place that is written down with spans from now on: a module's name, set by Python.
  void set_place(std::string place);
  std::string place();
  // The experts of a layer, over which routers spread rows evenly.
  void set_experts(int64_t experts) { experts_ = experts; }
  int64_t experts() const { return experts_; }
  // Integers of a device that the host may read: what a launch writes to that address, once;
  void write_numbers(const void* at, std::vector<int64_t> numbers);
  // none if no launch has written there;
  std::vector<int64_t> take_numbers(const void* at);
  // and integers of these sizes, which all are `value`.
  void set_integers_of(std::vector<int64_t> sizes, int64_t value) { integers_of_[std::move(sizes)] = value; }
  std::optional<int64_t> integers_of(const std::vector<int64_t>& sizes) const {
    const auto found = integers_of_.find(sizes);
    return found == integers_of_.end() ? std::nullopt : std::optional(found->second);
  }
  // Keeps spans from now on, or none.
  void keep_spans(bool keep);
  std::vector<Span> take_spans();
  std::string text(int number);

 private:
  friend class Timeline;

  int number_of(const std::string& text);
  // Occupies a link for so long, as soon as it is free after `from`, and returns when that begins. What the
  // host asks for later may come earlier, between what it has asked for.
  double take_link(const std::string& link, double from, double seconds);
  void add(int64_t stream, double begin, double end, Spent spent, const std::string& name);

  std::recursive_mutex mutex_;
  Model model_;
  std::map<std::pair<std::string, std::vector<int64_t>>, double> known_;
  double host_ = 0;
  std::map<std::string, std::map<double, double>> links_;  // when they are busy, from begin to end
  std::string place_;
  bool keeps_ = false;
  int64_t experts_ = 0;
  std::map<const void*, std::vector<int64_t>> numbers_written_;
  std::map<std::vector<int64_t>, int64_t> integers_of_;
  std::vector<Span> spans_;
  std::unordered_map<std::string, int> numbers_;
  std::vector<std::string> texts_;
};

// The time of one stream.
class Timeline {
 public:
  explicit Timeline(int64_t stream) : stream_(stream) {}

  // The host asks for an operation.
  void work(const std::string& name, const Work& work);
  // The stream waits until `moment`. is_asked: by a call of the host's, else within an operation.
  void until(double moment, const std::string& what, bool is_asked = true);
  // An operation that occupies a link, which carries one at a time. Returns when its last byte has left.
  double transfer(const std::string& name, const Work& work, const std::string& link);
  // A further part of the operation that was asked last.
  void go_on(const std::string& name, double seconds);
  // A part of it that leaves by a link beside it, in so many seconds. Returns when it has left.
  double store(double seconds, const std::string& link);
  // Returns the moment at which all is done that was asked so far.
  double done();
  // Returns the name of the stream's last operation, for those who wait for it.
  std::string last();

 private:
  double begin_now(const char* call);

  const int64_t stream_;
  double now_ = 0;
  std::string last_ = "nothing";
};

}  // namespace sim
