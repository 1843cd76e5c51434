// What this process knows of one process group: who is in it, how chunks reach them, and which tier its ops
// take.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/rendezvous.h"
#include "transport/settings.h"
#include "transport/transport.h"

namespace pyruntime {

class Group {
 public:
  // The group of that name: that of a process group, or a companion that was made before. The first use that
  // needs a transport is collective over the group.
  static Group& get(const std::string& name);
  // Makes a companion of the group of that name, with its settings and deadline of this moment, or gives it
  // these; where that changes how chunks travel, what the companion holds is freed. All of its ranks call it
  // alike. Returns its name.
  static std::string companion(const std::string& of, TrafficClass traffic_class,
                               std::optional<std::pair<int, int>> edge, int within);
  // Forgets the group and frees its workspaces.
  static void close(const std::string& name);
  // Forgets those whose process group torch has destroyed: they can send nothing more.
  static void forget_destroyed();
  // Called with the name of each group of a process group when it is made, by the thread that asks for it.
  // Set once, before the first.
  static void on_new(std::function<void(const std::string&)> hook);
  // For the end of the process: waits until what all its groups have to send has arrived, as other ranks may
  // still be waiting for it, and tells them that nothing more will come.
  static void leave_all();
  // Figures of all groups that are open, by class of traffic.
  static std::map<TrafficClass, CommStats> all_stats();

  // job_ranks: of the process group's ranks, by rank.
  Group(GroupKey key, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
        const std::vector<int>& job_ranks);

  const std::string& name() const { return context_.name; }
  int rank() const { return context_.rank; }
  int world_size() const { return context_.world_size; }
  c10d::ProcessGroup& process_group() const { return *rendezvous_.process_group(); }

  // For tensors of that device; over the process group's own collectives where there is no other.
  Transport& transport(c10::Device device);
  // Whether transport() has been asked before for tensors of that device; until then asking is collective.
  bool transport_sought(c10::Device device) const { return transports_.count(device) > 0; }
  // `device`, or where it names no index the one of its kind that the group has a transport for, if any.
  c10::Device known_device(c10::Device device) const;
  // Whether chunks of tensors on that device are sent through a network. Collective until the first op.
  bool crosses_hosts(c10::Device device);
  // In words; empty before the first op.
  std::string transport_description() const;
  // All ranks must settle the same, before the first op.
  void configure(GroupSettings settings);
  void set_traffic_class(TrafficClass traffic_class) { context_.traffic_class = traffic_class; }
  // Frees what the group holds; its deadline and its settings stay. The next op makes the workspaces anew,
  // collectively.
  void free_workspaces();

  // This rank has left a pass by an exception: see GroupContext::failed_passes.
  void note_failed_pass() { ++context_.failed_passes; }

  CommStats stats() const { return context_.stats; }
  // See pyruntime::count_collective.
  void count_collective(Op op, int64_t bytes, double begin) {
    pyruntime::count_collective(context_, op, bytes, begin);
  }
  int64_t workspace_bytes() const;
  void set_deadline_seconds(double seconds) { context_.deadline_seconds = seconds; }
  double deadline_seconds() const { return context_.deadline_seconds; }

  // To tell the other ranks something before the first op, or beside all ops.
  Rendezvous& rendezvous() { return rendezvous_; }

 private:
  // By where the ranks are and what was settled. Collective. Raises ValueError where what was settled is not
  // possible there, or ranks settled different things; on all ranks, PeerLost or CommTimeout that name a rank
  // where the store or a peer cannot be reached.
  std::unique_ptr<Transport> make_transport(c10::Device device);
  std::unique_ptr<Transport> open_transport(c10::Device device);
  // As `served` has them.
  void take_settings(const Group& served);

  GroupKey key_;
  GroupContext context_;
  Rendezvous rendezvous_;
  GroupSettings settings_;
  // The CPU's first.
  std::mutex transports_mutex_;  // while transport() looks for one and makes it
  std::map<c10::Device, std::unique_ptr<Transport>, bool (*)(const c10::Device&, const c10::Device&)>
      transports_{[](const c10::Device& a, const c10::Device& b) { return a.str() < b.str(); }};
};

}  // namespace pyruntime
