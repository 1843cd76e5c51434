// Values in the job's store, with their length and a check: anybody who reaches the store can write there,
// and what another program has written is not taken for a rank's word. No protection against forgery.
#pragma once

#include <optional>
#include <string>

namespace pyruntime {

// 4 bytes "pyr1", 8 bytes length, 8 bytes FNV-1a of the value (both little-endian), and the value.
std::string seal(const std::string& value);

// The value; none where `bytes` are not what seal() makes.
std::optional<std::string> unseal(const std::string& bytes);

}  // namespace pyruntime
