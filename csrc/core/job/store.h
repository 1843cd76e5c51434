// Waits for a key of a c10d store, by polling: a store's own wait can be neither interrupted nor always
// bounded.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

namespace pyruntime {

// Waits until `key` is in the store or `seconds` have passed, and returns which. Ctrl-C and a ScopedWaitCheck
// end it.
bool await_key(c10d::Store& store, const std::string& key, double seconds);

}  // namespace pyruntime
