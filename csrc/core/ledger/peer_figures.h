// The cost of each peer since the job began: how long this process waited for it, and what it sent there.
// CommStats has sums by group, which do not say whom a rank waited for.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "core/ledger/traffic.h"

namespace pyruntime {

struct PeerFigures {
  double waiting_s = 0;
  int64_t bytes = 0;      // sent to another host, and acknowledged
  double transfer_s = 0;  // from leaving to being acknowledged, summed over chunks
};

// A rank of a process group, within a traffic class.
struct PeerKey {
  std::string process_group;
  TrafficClass traffic_class;
  int rank;

  bool operator<(const PeerKey& other) const {
    return std::tie(process_group, traffic_class, rank) <
           std::tie(other.process_group, other.traffic_class, other.rank);
  }
};

class PeerTable {
 public:
  static PeerTable& instance();

  // Any thread.
  void waited(const PeerKey& peer, double seconds);
  void sent(const PeerKey& peer, int64_t bytes, double seconds);
  std::map<PeerKey, PeerFigures> figures() const;
  // Forgets all peers when the job is over: the next job has other process groups of the same names.
  void forget();

 private:
  mutable std::mutex mutex_;
  std::map<PeerKey, PeerFigures> figures_;
};

}  // namespace pyruntime
