// A group of ranks as this process knows it: its members, its settings, and a transport for each device. Each
// transport owns the memory that its chunks travel in.
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
  // The group of that name: a process group's, or a companion made before. The first use that needs a
  // transport is collective over the group.
  static Group& get(const std::string& name);
  // Makes a companion of the group `of` with that group's current settings and deadline, or gives these to an
  // existing companion. If that changes how chunks travel, the companion's memory is freed. All of its ranks
  // make the same call. Returns its name.
  static std::string companion(const std::string& of, TrafficClass traffic_class,
                               std::optional<std::pair<int, int>> edge, int within);
  // Forgets the group and frees its workspaces.
  static void close(const std::string& name);
  // Forgets the groups whose process group torch has destroyed: they can send nothing more.
  static void forget_destroyed();
  // Sets a hook that is called with the name of each process group's group when it is made, by the thread
  // that makes it. Set once, before the first group.
  static void on_new(std::function<void(const std::string&)> hook);
  // For the end of the process: waits until everything that its groups have to send has arrived, because
  // other ranks may still wait for it. Then tells them that nothing more will come.
  static void leave_all();
  // The figures of all open groups, by traffic class.
  static std::map<TrafficClass, CommStats> all_stats();

  // job_ranks: the ranks in the job, by rank in the process group.
  Group(GroupKey key, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
        const std::vector<int>& job_ranks);

  const std::string& name() const { return context_.name; }
  int rank() const { return context_.rank; }
  int world_size() const { return context_.world_size; }
  c10d::ProcessGroup& process_group() const { return *rendezvous_.process_group(); }

  // The transport for tensors of that device; the process group's own collectives if there is no other.
  Transport& transport(c10::Device device);
  // Whether transport() has been called for that device; until then a call is collective.
  bool transport_sought(c10::Device device) const { return transports_.count(device) > 0; }
  // `device`; without an index, the device of that kind for which the group has a transport, if any.
  c10::Device known_device(c10::Device device) const;
  // Whether chunks of tensors on that device are sent through a network. Collective until the first op.
  bool crosses_hosts(c10::Device device);
  // The transport in words; empty before the first op.
  std::string transport_description() const;
  // Sets the group's settings; all ranks must pass the same, before the first op.
  void configure(GroupSettings settings);
  void set_traffic_class(TrafficClass traffic_class) { context_.traffic_class = traffic_class; }
  // Frees the group's memory; its deadline and settings stay. The next op makes the workspaces again,
  // collectively.
  void free_workspaces();

  // Counts a pass that this rank has left by an exception: see GroupContext::failed_passes.
  void note_failed_pass() { ++context_.failed_passes; }

  CommStats stats() const { return context_.stats; }
  // See pyruntime::count_collective.
  void count_collective(Op op, int64_t bytes, double begin) {
    pyruntime::count_collective(context_, op, bytes, begin);
  }
  int64_t workspace_bytes() const;
  void set_deadline_seconds(double seconds) { context_.deadline_seconds = seconds; }
  double deadline_seconds() const { return context_.deadline_seconds; }

  // For values to exchange with the other ranks before the first op, or beside all ops.
  Rendezvous& rendezvous() { return rendezvous_; }

 private:
  // Chooses the transport by where the ranks are and by the settings. Collective. Raises ValueError if the
  // settings are not possible there, or differ between ranks. If the store or a peer cannot be reached,
  // raises PeerLost or CommTimeout, on all ranks, with the name of a rank.
  std::unique_ptr<Transport> make_transport(c10::Device device);
  std::unique_ptr<Transport> open_transport(c10::Device device);
  // Takes the settings of `served`, whose companion this is.
  void take_settings(const Group& served);

  GroupKey key_;
  GroupContext context_;
  Rendezvous rendezvous_;
  GroupSettings settings_;
  std::mutex transports_mutex_;  // held while transport() looks for a transport and makes it
  std::map<c10::Device, std::unique_ptr<Transport>, bool (*)(const c10::Device&, const c10::Device&)>
      transports_{[](const c10::Device& a, const c10::Device& b) { return a.str() < b.str(); }};
};

}  // namespace pyruntime
