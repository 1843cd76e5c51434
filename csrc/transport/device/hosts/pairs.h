// Process groups of two ranks, for the messages of one direction between devices of several hosts.
//
// A process group of NCCL does what it is asked for in that order, and a send ends only when its receive has
// begun. In one group for all messages of a pipeline the two ends would ask in different orders: one for a
// send first, the other for a send too. So each edge has a group of its own, where both ends follow one
// order.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <string>

#include "transport/group_context.h"

namespace pyruntime {

// Sets what makes them: it registers with torch, under `name`, a process group of the ranks of `context`, in
// their order, whose backend for `device` is that of context.process_group. Set once, before the first group;
// it may take the GIL.
using PairMaker =
    std::function<void(const std::string& name, const GroupContext& context, c10::Device device)>;
void set_pair_maker(PairMaker maker);

// Makes one. Both ranks make the same call.
c10::intrusive_ptr<c10d::ProcessGroup> make_pair(const std::string& name, const GroupContext& context,
                                                 c10::Device device);

}  // namespace pyruntime
