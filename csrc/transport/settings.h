// What users settle of a group, and which group it is.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/ledger/traffic.h"
#include "core/rings.h"
#include "transport/ring/cost.h"

namespace pyruntime {

// That of a process group, or a companion of it: the same process group, with workspaces and an order of ops
// of its own.
struct GroupKey {
  std::string process_group;                // its name
  std::optional<TrafficClass> companion;    // for this class of traffic
  std::optional<std::pair<int, int>> edge;  // of these two of its ranks alone; the first becomes rank 0
  int within = 0;                           // its place within the class: chunks of a lower one leave first

  // What ops and messages call it: "tp", "tp (dp)", "tp (dp, +1)", "tp (cp, 2 to 3)". Nothing reads it again.
  std::string name() const;
};

enum class TransportKind {
  kAuto,          // by where the ranks are
  kSymmetric,     // symmetric memory; all ranks on one host
  kHierarchical,  // symmetric memory inside each host, the ring between hosts
  kProcessGroup,  // the ring between all ranks
  kDevice,        // as on devices: copy engines or sends in the order of streams; on the CPU, for tests
  kCollectives,   // the process group's own collectives; rows travel whole
};

// Raises ValueError for a name that is none of "auto", "symmetric_memory", "hierarchical", "process_group",
// "device", "collectives".
TransportKind transport_kind_named(const std::string& name);

// What goes through one address for all ranks' memory, where their devices have one (NVLink multicast).
enum class Multicast {
  kOff,              // each peer gets a copy of its own
  kGather,           // rows and sums that go to all are stored once; the same bits
  kGatherAndReduce,  // and sums are taken in the switch, in its order: not the same bits
};

// Raises ValueError for a name that is none of "off", "gather", "gather_and_reduce".
Multicast multicast_named(const std::string& name);
const char* name_of(Multicast multicast);

struct GroupSettings {
  TransportKind transport = TransportKind::kAuto;
  // By rank, instead of what the ranks' hosts are called; empty: ask them.
  std::vector<std::string> hosts;
  RingOptions ring;
  Multicast multicast = Multicast::kOff;  // between the devices of one host
  Rings rings;                            // around which gathered rows go there; none: straight to each peer

  bool operator==(const GroupSettings&) const = default;
  std::string text() const;
  // What of it holds for some of the ranks alone.
  GroupSettings among(const std::vector<int>& ranks) const;
};

}  // namespace pyruntime
