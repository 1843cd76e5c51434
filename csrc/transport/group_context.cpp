#include "transport/group_context.h"

#include <torch/csrc/autograd/graph_task.h>

namespace pyruntime {

// Forward and backward passes alternate, except where one backward pass follows another.
int32_t Passes::now() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task) return count;
  count += graph_task != -1 && task != -1 ? 2 : 1;
  graph_task = task;
  return count;
}

}  // namespace pyruntime
