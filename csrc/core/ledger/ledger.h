// The ledger of this process: its computing, waiting, copying and summing, and the bytes it read and sent,
// each with its times. It is off until it is started. Then an entry costs about 0.1 microseconds, and memory
// is taken once. pyruntime/overlap evaluates the entries.
//
//     kOp       an operator of torch or of ours that no other called: begin to end
//     kWait     this rank's thread waited for `peer`; kCopy and kSum: it copied or summed what travels
//     kRead     `bytes` of `peer` were read: begin = their op began, wanted = a thread asked for them,
//               end = they were there; where this rank received them from another host itself, also
//               left = they left the rank `from` (by its host's clock), arrived = they were all here
//     kSent     `bytes` went to another host: begin = they left, end = the peer had them
//     kArrived  `bytes` came from another host: begin = the receiver turned to them, end = they were there
//
// Operators are those of the thread that started the ledger. A node of autograd lasts until the next one
// begins, so it includes what the engine adds up and calls between them.
//
// The ledger of a device has what its stream does in place of the thread, and points of StreamClock for
// times. Nodes of autograd run on a thread of the engine there, while the other one waits for them.
//
// An entry names the layer (a module's path) of its operator: in the forward pass as set_layer() says, in the
// backward pass by the sequence numbers by which autograd knows its nodes.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pyruntime {

enum class Entered : int32_t { kOp = 0, kWait, kCopy, kSum, kRead, kSent, kArrived };

struct LedgerEntry {
  Entered kind;
  int32_t axis = -1;  // TrafficClass
  int32_t name = 0;   // number of a name: the operator
  int32_t layer = 0;  // number of a name; 0: none
  int32_t peer = -1;  // rank of the process group; -1: several, or none
  int32_t thread = 0;
  int32_t from = -1;  // sender's rank in the process group
  int64_t bytes = 0;
  double begin = 0, wanted = 0, end = 0;  // monotonic_seconds(), or for a device what moment() returns
  double left = 0, arrived = 0;           // 0: not known
};

class Ledger {
 public:
  static Ledger& instance();

  static bool is_on() { return on_.load(std::memory_order_relaxed); }

  // Takes memory for `capacity` entries and returns the number of this thread, under which the entries of a
  // device's stream are too. Raises RuntimeError if the ledger is on.
  int32_t start(size_t capacity, c10::Device device);
  void stop();

  struct Taken {
    std::vector<LedgerEntry> entries;  // in the order in which they ended
    int64_t lost;                      // entries that found no room
  };
  // The entries since the start or the last take().
  Taken take();
  // The names by number; they stay for as long as the process lives.
  std::vector<std::string> names() const;

  // Any thread. The thread's number and layer are filled in.
  void enter(LedgerEntry entry);
  int32_t number_of(std::string_view name);

  // Sets the layer that this thread computes from now on, by the number of its name; returns the former one.
  static int32_t set_layer(int32_t layer);
  static int32_t layer();

 private:
  // Looks a name up without copying it.
  struct HashOfText {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  Ledger();

  inline static std::atomic<bool> on_{false};
  mutable std::mutex mutex_;
  std::vector<LedgerEntry> entries_;
  size_t capacity_ = 0;
  int64_t lost_ = 0;
  int32_t thread_ = 0;  // that started it
  std::vector<std::string> names_;
  std::unordered_map<std::string, int32_t, HashOfText, std::equal_to<>> numbers_;
};

// A scope in which this thread computes for another layer than the operator around it. It is entered as an
// operator of its own and interrupts the outer one.
class LedgerOperator {
 public:
  // `name`: a literal. `layer`: the number of a name.
  LedgerOperator(const char* name, int32_t layer);
  ~LedgerOperator();
  LedgerOperator(const LedgerOperator&) = delete;
  LedgerOperator& operator=(const LedgerOperator&) = delete;

 private:
  bool is_on_;
  int32_t outer_name_ = 0, outer_layer_ = 0;
};

}  // namespace pyruntime
