// Transport between ranks of one host: they read each other's rows where they were written; nothing is sent.
#pragma once

#include <memory>

#include "transport/transport.h"
#include "transport/workspace_group.h"

namespace pyruntime {

// Collective over the group.
std::unique_ptr<Transport> make_one_host_transport(GroupContext& context,
                                                   std::unique_ptr<WorkspaceGroup> group);

}  // namespace pyruntime
