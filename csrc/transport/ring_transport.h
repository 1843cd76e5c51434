// The transport that ring.h makes, as its sources share it.
//
// Threads that meet in it:
//     op's         begins flights, waits for peers, closes the group; one at a time
//     arbiter's    takes in control messages, and sends what the lanes offer
//     receivers'   one for each neighbour upstream: takes in its chunks
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <thread>
#include <utility>
#include <vector>

#include "core/arbiter.h"
#include "core/failure_board.h"
#include "transport/control_line.h"
#include "transport/host_workspace.h"
#include "transport/point_to_point.h"
#include "transport/ring.h"
#include "transport/ring_flight.h"
#include "transport/ring_schedule.h"
#include "transport/transport.h"

namespace pyruntime {

// Tags of data: which opening of the group, which flight, which stream, which piece.
inline constexpr int kTagBase = 1 << 30;
inline constexpr int kProbeTag = kTagBase - 1;

class RingTransport : public Transport {
 public:
  // ring.cpp
  RingTransport(GroupContext& context, RingParts parts, const RingOptions& options,
                const std::function<std::vector<double>(const std::vector<double>&)>& agree);
  ~RingTransport() override;
  void flush() override;
  void leave() override;
  bool crosses_hosts() const override { return true; }
  std::string description() const override;
  int64_t workspace_bytes() const override;

  // ring_gather_scatter.cpp
  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override;

  // ring_cost.cpp
  std::string why_not_pieces(int pieces) const override;
  std::vector<int> other_pieces(const FlightDescriptor& descriptor) const override;

  // What flights use, in the op's thread.
  const HostLayout& layout() const { return parts_.layout; }
  void published() { arbiter().wake(); }

  // ring_failures.cpp
  // Waits for something that a peer does; `what` says what it is, for messages.
  void await(const std::function<bool()>& arrived, const RingFlight& flight, int peer,
             const std::function<std::string()>& what);
  // An op was left by an exception: the peers may wait for chunks that never come.
  void poison(const std::string& why);

 private:
  class FlightLane;

  // Takes in what one neighbour sends, in the order in which it says that it sends.
  struct Receiver {
    std::thread thread;
    std::condition_variable noticed;
    std::deque<std::pair<uint64_t, std::pair<int, size_t>>> notices;  // (flight, (stream, index))
    PendingTransfer* current = nullptr;
  };

  struct SlotState {
    std::shared_ptr<RingFlight> flight;  // the latest to work in it
    Scratch scratch;
  };

  struct Begun {
    uint64_t last = 0;
    std::map<uint64_t, FlightDescriptor> early;  // flights that this rank has not begun yet
  };

  Arbiter& arbiter() const { return *parts_.arbiter; }
  int rank_of_host(int host) const { return layout().rank_at(host, layout().local_rank()); }
  Receiver& upstream(const RingStream& stream) { return receivers_[rank_of_host(stream.upstream)]; }
  SendWindow& window_to(int host) { return *windows_.at(host); }
  std::string link_name() const { return parts_.link->name(); }
  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  // --- ring.cpp: beginning a flight; the op's thread

  // `announced` is what the ranks compare.
  std::shared_ptr<RingFlight> begin(FlightKind kind, const FlightDescriptor& descriptor, int pieces,
                                    const FlightDescriptor& announced);
  std::shared_ptr<RingFlight> begin(uint64_t number, FlightKind kind, const FlightDescriptor& descriptor,
                                    int pieces, const FlightDescriptor& announced);
  void await_slot(SlotState& slot, uint64_t number);
  std::shared_ptr<RingFlight> flight_of(uint64_t number);  // any thread

  // --- ring_traffic.cpp: what leaves and what comes in

  // The op's thread.
  void post_receives(RingFlight& flight);
  void add_lanes(const std::shared_ptr<RingFlight>& flight);
  // The arbiter's thread.
  void send_head(RingFlight& flight, StreamState& stream);
  void acknowledge(const ControlMessage& message);
  // A receiver's thread.
  void receive(int peer, Receiver& receiver);

  // --- ring_control.cpp: what neighbours tell each other

  static ControlMessage message(ControlMessage::Kind kind, int stream, uint64_t flight, uint64_t index);
  // The op's thread.
  void introduce(RingFlight& flight, const FlightDescriptor& announced);
  // The arbiter's thread.
  void handle(int peer, const ControlMessage& message);
  bool closed_by(int peer);
  // Any thread, under the lock.
  void meet(int peer, RingFlight& flight, const FlightDescriptor& theirs);

  // --- ring_failures.cpp: how waits end

  // The op's thread.
  std::string silent_neighbour(uint64_t number);
  std::string neighbours_text();
  std::string seconds_text() const;
  // Any thread, under the lock.
  void set_failure(Failure failure);
  // Any thread.
  void lose(int peer, const std::string& what);
  // The op's thread.
  void raise_if_broken();
  void raise_if_failed(const RingFlight* flight);
  void raise_if_deserted(const RingFlight& flight);
  [[noreturn]] void fail_timeout(const std::string& text);

  // --- ring_cost.cpp: the link's cost, and the number of pieces; the op's thread, or the one that opens

  void settle_cost(const std::function<std::vector<double>(const std::vector<double>&)>& agree);
  void measure(const std::function<std::vector<double>(const std::vector<double>&)>& agree);
  double exchange_probe(std::vector<char>& in, const std::vector<char>& out, int64_t bytes);
  int pieces_for(const FlightDescriptor& descriptor) const;

  // Written while the group is opened, then read by any thread.
  RingParts parts_;
  RingOptions options_;
  LinkCost cost_;
  pid_t pid_;
  std::map<int, SendWindow*> windows_;  // by neighbouring host
  // Of the op's thread alone.
  uint64_t last_number_ = 0;
  std::array<std::vector<std::shared_ptr<Lane>>, kSlots> lanes_;  // of the flights in the slots

  std::mutex mutex_;  // guards what follows; never held while calling the arbiter
  // Only the op's thread puts flights in, so it may look at them without the lock. The scratch is its own.
  std::array<SlotState, kSlots> slots_;
  std::array<FlightDescriptor, kSlots> announced_;  // of the flights in the slots
  std::map<int, Begun> begun_;                      // by neighbour
  std::map<int, Receiver> receivers_;               // by neighbour, all made while the group is opened
  uint64_t probe_round_ = 0;
  std::map<int, uint64_t> answered_;  // the latest probe, by neighbour
  std::map<int, bool> said_bye_;
  std::map<int, bool> closed_;
  Failure failure_;
  std::string poisoned_;  // why no op may begin any more; empty while they may
  // Read without the lock; failed_ is set under it.
  std::atomic<bool> failed_{false};
  std::atomic<bool> closing_{false};
};

}  // namespace pyruntime
