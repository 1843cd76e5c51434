#include "core/job/sealed.h"

#include <cstdint>
#include <string_view>

namespace pyruntime {

namespace {

constexpr std::string_view kMagic = "pyr1";
constexpr size_t kNumber = 8, kHead = kMagic.size() + 2 * kNumber;

uint64_t fnv1a(std::string_view bytes) {
  uint64_t digest = 14695981039346656037ULL;
  for (const char byte : bytes) digest = (digest ^ static_cast<unsigned char>(byte)) * 1099511628211ULL;
  return digest;
}

std::string little_endian(uint64_t number) {
  std::string bytes(kNumber, '\0');
  for (size_t i = 0; i < kNumber; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return bytes;
}

}  // namespace

std::string seal(const std::string& value) {
  return std::string(kMagic) + little_endian(value.size()) + little_endian(fnv1a(value)) + value;
}

std::optional<std::string> unseal(const std::string& bytes) {
  if (bytes.size() < kHead) return std::nullopt;
  const std::string value = bytes.substr(kHead);
  if (bytes.compare(0, kHead, seal(value), 0, kHead) != 0) return std::nullopt;
  return value;
}

}  // namespace pyruntime
