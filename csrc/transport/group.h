// What this process knows of one process group: who is in it, how chunks reach them, and which tier its ops
// take.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/peers.h"
#include "transport/multicast.h"
#include "transport/ring.h"
#include "transport/transport.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// How tier="auto" finds the tier for one op and shape.
struct TierTrials {
  std::vector<double> chunked;  // seconds of the calls so far
  std::vector<double> fused;
  std::vector<double> unfused;
  std::string why_not_fused;  // then there are no such calls
  std::string tier;           // the one chosen; empty until then
  double chunked_s = 0;       // their medians
  double fused_s = 0;
  double unfused_s = 0;
  // Calls of the fused tier that took the chunked one, and why the last of them did.
  int64_t crowded = 0;
  std::string why_crowded;
  // Where they were chosen beforehand (ops/tier_presets.h):
  std::string tiles;  // of the fused kernel
  std::string tuned;  // by what
};

enum class TransportKind {
  kAuto,          // by where the ranks are
  kSymmetric,     // symmetric memory; all ranks on one host
  kHierarchical,  // symmetric memory inside each host, the ring between hosts
  kProcessGroup,  // the ring between all ranks
  kDevice,        // as on devices: copy engines or sends in the order of streams; on the CPU, for tests
  kCollectives,   // none: the process group's own collectives, unfused
};

// Raises ValueError for a name that is none of "auto", "symmetric_memory", "hierarchical", "process_group",
// "device", "collectives".
TransportKind transport_kind_named(const std::string& name);

struct GroupSettings {
  TransportKind transport = TransportKind::kAuto;
  // By rank, instead of what the ranks' hosts are called; empty: ask them.
  std::vector<std::string> hosts;
  RingOptions ring;
  Multicast multicast = Multicast::kOff;  // between the devices of one host

  bool operator==(const GroupSettings&) const = default;
};

class Group {
 public:
  // The group of that name: that of a process group; or NAME#CLASS, a companion with the ranks and the
  // process group of NAME and workspaces and ops of its own for a class of traffic; or NAME#CLASS:A>B, the
  // same for two ranks of NAME, of which A becomes rank 0. Made on first use; the
  // first use that needs a transport is collective over the group.
  static Group& get(const std::string& name);
  // Forgets the group and frees its workspaces.
  static void close(const std::string& name);
  // For the end of the process: waits until what all its groups have to send has arrived, as other ranks may
  // still be waiting for it, and tells them that nothing more will come.
  static void leave_all();
  // Figures of all groups that are open, by class of traffic.
  static std::map<TrafficClass, CommStats> all_stats();

  Group(std::string name, c10::intrusive_ptr<c10d::ProcessGroup> process_group);
  ~Group();

  const std::string& name() const { return context_.name; }
  int rank() const { return context_.rank; }
  int world_size() const { return context_.world_size; }
  c10d::ProcessGroup& process_group() const { return *process_group_; }

  // nullptr when there is none for tensors of that device; `why_no_transport` then says why.
  Transport* transport(c10::Device device);
  std::string why_no_transport(c10::Device device) const;
  // Whether transport() has been asked before for tensors of that device; until then asking is collective.
  bool transport_sought(c10::Device device) const {
    return device.is_cpu() ? transport_sought_ : on_devices_.count(device) > 0;
  }
  // `device`, or where it names no index the one of its kind that the group has a transport for, if any.
  c10::Device known_device(c10::Device device) const;
  // Whether chunks of tensors on that device are sent through a network. Collective until the first op.
  bool crosses_hosts(c10::Device device);
  // In words; empty before the first op.
  std::string transport_description() const;
  // All ranks must settle the same, before the first op.
  void configure(GroupSettings settings);
  // Settings and deadline as `other` has them, of which this is a companion; where that changes how chunks
  // travel, what the group holds is freed. All ranks call it alike.
  void follow(const Group& other);
  void set_traffic_class(TrafficClass traffic_class) { context_.traffic_class = traffic_class; }
  // Frees what the group holds; its deadline and its settings stay. The next op makes the workspaces anew,
  // collectively.
  void free_workspaces();

  CommStats stats() const { return context_.stats; }
  int64_t workspace_bytes() const;
  void set_deadline_seconds(double seconds) { context_.deadline_seconds = seconds; }
  double deadline_seconds() const { return context_.deadline_seconds; }

  // What this rank says about `topic` to others of the group, through the job's store, and what `peer` has
  // said: before the first op and beside all ops. hear() raises, on all ranks, PeerLost where the peer has
  // ended and CommTimeout where it does not come within `seconds`, or with `while_it_lives` where it has
  // shown no sign of life for so long. `doing` begins the sentence.
  void tell(const std::string& topic, const std::string& value);
  // A number that no topic has had: the same on all ranks, which call it alike.
  int64_t next_meeting();
  std::string hear(int peer, const std::string& topic, const std::string& doing, double seconds,
                   bool while_it_lives);
  // For a collective of torch's over this group that has failed: see raise_for_missing() in core/peers.h.
  [[noreturn]] void raise_for_missing(const std::string& doing, const std::string& cause);

  // By TierKey::text().
  std::map<std::string, TierTrials>& tier_trials() { return tier_trials_; }
  // That each rank's rows travel in, of the ops so far that took a tuned number.
  std::map<std::string, int>& tuned_chunks() { return tuned_chunks_; }
  const std::map<std::string, int>& tuned_chunks() const { return tuned_chunks_; }

 private:
  void open_transport();
  // For tensors on a device; collective when first asked for one of its kind.
  Transport* device_transport(c10::Device device);
  std::unique_ptr<Transport> open_device_transport(c10::Device device, int hosts, int64_t opening);
  // Raises ValueError where multicast was asked for and there is a reason against it.
  void check_multicast_can_be(const std::string& why_not) const;
  // Tells messages of this opening apart from those of others over the same process group.
  int instance_of(int64_t opening) const;
  // All ranks of this group, under the name of this opening.
  std::unique_ptr<WorkspaceGroup> workspace_group() const;
  // A number for this opening, the same on all ranks, and the ranks' hosts.
  std::pair<int64_t, std::vector<std::string>> begin_opening();
  // The ranks' hosts, by rank; raises ValueError where the ranks settled different things.
  std::vector<std::string> meet(int64_t opening);
  void join_job();
  std::string key_of(const std::string& topic, int rank) const;
  // With its number in the job, once it has made the group too.
  Peer peer_of(int rank);
  // What every rank puts under `topic`, by rank. Collective.
  std::vector<std::string> exchange(const std::string& topic, const std::string& own);
  std::unique_ptr<Transport> make_ring(const HostLayout& layout, const std::vector<std::string>& hosts,
                                       int64_t opening);

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::vector<int> ranks_;        // of the process group, by rank in this group
  std::map<int, int> job_ranks_;  // of this group's ranks, where they are known
  GroupContext context_;
  GroupSettings settings_;
  std::unique_ptr<Transport> transport_;
  bool transport_sought_ = false;
  std::string workspaces_;  // what rank 0 calls this opening, on all ranks
  std::string why_no_transport_;
  struct OnDevice {
    std::unique_ptr<Transport> transport;
    std::string why_none;
  };
  std::map<c10::Device, OnDevice, bool (*)(const c10::Device&, const c10::Device&)> on_devices_{
      [](const c10::Device& a, const c10::Device& b) { return a.str() < b.str(); }};
  std::map<std::string, TierTrials> tier_trials_;
  std::map<std::string, int> tuned_chunks_;  // by shared_text() of ops/tier.h
};

}  // namespace pyruntime
