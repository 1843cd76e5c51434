// Derives the work of an operator of torch from the shapes of its tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "sim/clock/clock.h"

namespace sim {

// GEMMs are {m, n, k, batches, bytes of an element}; all else is memory that is read and written, in one
// launch. An argument that is read is counted once, with no more bytes than its memory has.
Work work_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments,
             const std::vector<c10::IValue>& results);

Work memory_work(int64_t bytes);

}  // namespace sim
