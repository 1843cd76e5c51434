// Transport over the process group's own collectives, for groups whose ranks have no other. Rows are gathered
// and reduced whole, so nothing is hidden behind a GEMM.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "transport/transport.h"

namespace pyruntime {

// Makes a transport for tensors of `device`, among all ranks of `process_group`. `why`: the answer of
// why_not_chunked(). bf16 and fp16 are summed in fp32; ragged rows are padded to the largest share.
std::unique_ptr<Transport> make_collectives_transport(GroupContext& context,
                                                      c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                      c10::Device device, std::string why);

}  // namespace pyruntime
