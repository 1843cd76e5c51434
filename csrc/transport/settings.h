// A group's identity and the settings that users choose for it.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/ledger/traffic.h"
#include "core/rings.h"
#include "transport/ring/cost.h"

namespace pyruntime {

// Identifies the group of a process group, or a companion of it: the same process group, with its own
// workspaces and order of ops.
struct GroupKey {
  std::string process_group;                // its name
  std::optional<TrafficClass> companion;    // for this class of traffic
  std::optional<std::pair<int, int>> edge;  // only these two of its ranks; the first becomes rank 0
  int within = 0;                           // its place within the class: chunks of a lower place leave first

  // The name in ops and messages: "tp", "tp (dp)", "tp (dp, +1)", "tp (cp, 2 to 3)". Nothing parses it.
  std::string name() const;
};

enum class TransportKind {
  kAuto,          // chosen by where the ranks are
  kSymmetric,     // symmetric memory; all ranks on one host
  kHierarchical,  // symmetric memory inside each host, the ring between hosts
  kProcessGroup,  // the ring between all ranks
  kDevice,        // the devices' (copy engines, or sends in stream order); tests run it on the CPU
  kCollectives,   // the process group's own collectives; rows travel whole
};

// Raises ValueError for a name that is none of "auto", "symmetric_memory", "hierarchical", "process_group",
// "device", "collectives".
TransportKind transport_kind_named(const std::string& name);

// Traffic over one address for all ranks' memory, if their devices have one (NVLink multicast).
enum class Multicast {
  kOff,              // each peer gets a copy of its own
  kGather,           // rows and sums for all ranks are stored once; the same bits
  kGatherAndReduce,  // also sums in the switch, in its order: not the same bits
};

// Raises ValueError for a name that is none of "off", "gather", "gather_and_reduce".
Multicast multicast_named(const std::string& name);
const char* name_of(Multicast multicast);

struct GroupSettings {
  TransportKind transport = TransportKind::kAuto;
  // Host names by rank, which replace the real ones; empty: use the real ones.
  std::vector<std::string> hosts;
  RingOptions ring;
  Multicast multicast = Multicast::kOff;  // between the devices of one host
  Rings rings;                            // gathered rows go around these there; none: straight to each peer

  bool operator==(const GroupSettings&) const = default;
  std::string text() const;
  // The part of the settings that holds for only some of the ranks.
  GroupSettings among(const std::vector<int>& ranks) const;
};

}  // namespace pyruntime
