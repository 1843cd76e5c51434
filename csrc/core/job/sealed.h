// Seals values in the job's store with their length and a checksum. Anybody who reaches the store can write
// there, and another program's bytes must not be taken for a rank's. No protection against forgery.
#pragma once

#include <optional>
#include <string>

namespace pyruntime {

// 4 bytes "pyr1", 8 bytes length, 8 bytes FNV-1a of the value (both little-endian), then the value.
std::string seal(const std::string& value);

// The value; none if seal() did not make `bytes`.
std::optional<std::string> unseal(const std::string& bytes);

}  // namespace pyruntime
