// Memory that the ranks of one host share: a slot for each flight under way, with flags for its written
// parts.
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
  // The start of the peer's slot.
  virtual char* memory(int peer) = 0;
  // Sets flag `chunk` of this rank: the memory that it stands for may be read. Any thread.
  virtual void publish(int chunk) = 0;
  // Whether the peer's flag is set. Any thread.
  virtual bool ready(int peer, int chunk) const = 0;
  // Waits until the peer has begun this flight; raises ValueError if it is doing something else.
  virtual const FlightDescriptor& rendezvous(int peer) = 0;
  // Waits for the peer's flag.
  virtual void wait(int peer, int chunk) = 0;
  // Says that this rank has read all that it wanted: the peers may use their memory again.
  virtual void finish() = 0;
};

class HostWorkspace {
 public:
  virtual ~HostWorkspace() = default;

  // Claims `bytes` on every rank of the host (the same number everywhere).
  virtual std::unique_ptr<HostFlight> begin(const FlightDescriptor& descriptor, int64_t bytes) = 0;
  virtual int64_t bytes() const = 0;
};

// Makes a workspace shared through symmetric memory. Collective over the ranks of the host: `ranks` are their
// numbers in the group, in order, `local_rank` is this rank's place among them, and `group` is theirs. A
// flight has `flags` flags on each rank.
std::unique_ptr<HostWorkspace> make_symmetric_workspace(GroupContext& context,
                                                        std::unique_ptr<WorkspaceGroup> group,
                                                        std::vector<int> ranks, int local_rank, int flags);

// Makes the workspace of a rank that is the only one on its host.
std::unique_ptr<HostWorkspace> make_private_workspace(GroupContext& context, int flags);

}  // namespace pyruntime
