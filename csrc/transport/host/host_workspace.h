// Memory that the ranks of one host share, a slot of it for each flight under way, with flags that say what
// in it has been written.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/flights.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// One flight's slot on every rank of the host. Ranks are numbered within the host.
class HostFlight {
 public:
  virtual ~HostFlight() = default;

  virtual uint64_t number() const = 0;
  // Start of the peer's slot.
  virtual char* memory(int peer) = 0;
  // Flag `chunk` of this rank is set: what it stands for may be read. Any thread may call it.
  virtual void publish(int chunk) = 0;
  // Whether the peer's flag is set. Any thread may call it.
  virtual bool ready(int peer, int chunk) const = 0;
  // Waits until the peer has begun this flight and raises ValueError where it is doing something else.
  virtual const FlightDescriptor& rendezvous(int peer) = 0;
  // Waits for the peer's flag.
  virtual void wait(int peer, int chunk) = 0;
  // This rank has read all it wanted: the peers may use their memory again.
  virtual void finish() = 0;
};

class HostWorkspace {
 public:
  virtual ~HostWorkspace() = default;

  // Claims `bytes` on every rank of the host (the same number everywhere).
  virtual std::unique_ptr<HostFlight> begin(const FlightDescriptor& descriptor, int64_t bytes) = 0;
  virtual int64_t bytes() const = 0;
};

// Workspaces shared through symmetric memory. Collective over the ranks of the host: `ranks` gives their
// ranks in the group, in order, and `local_rank` which of them this is; `group` is theirs. A flight has
// `flags` flags on each rank.
std::unique_ptr<HostWorkspace> make_symmetric_workspace(GroupContext& context,
                                                        std::unique_ptr<WorkspaceGroup> group,
                                                        std::vector<int> ranks, int local_rank, int flags);

// For a rank that is alone on its host.
std::unique_ptr<HostWorkspace> make_private_workspace(GroupContext& context, int flags);

}  // namespace pyruntime
