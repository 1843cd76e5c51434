#include "ops/tier/tier.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace pyruntime {

namespace {

int positive_number(const std::string& text) {
  const bool is_one =
      !text.empty() && text.size() < 7 && text.find_first_not_of("0123456789") == std::string::npos;
  return is_one ? std::stoi(text) : 0;
}

}  // namespace

const char* name_of(Tier tier) {
  constexpr const char* kNames[] = {"auto", "unfused", "chunked", "fused"};
  return kNames[static_cast<int>(tier)];
}

std::string TierChoice::text() const {
  std::string text = name_of(tier);
  if (chunks > 0) text += ":" + std::to_string(chunks);
  return tiles.empty() ? text : text + ":" + tiles;
}

TierChoice tier_named(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon), detail = colon < text.size() ? text.substr(colon + 1) : "";
  for (const Tier tier : {Tier::kAuto, Tier::kUnfused, Tier::kChunked, Tier::kFused}) {
    if (name != name_of(tier)) continue;
    if (colon == std::string::npos) return {tier};
    if (tier == Tier::kFused && !detail.empty()) return {tier, 0, detail};
    const bool takes_chunks = tier == Tier::kUnfused || tier == Tier::kChunked;
    if (takes_chunks && positive_number(detail) > 0) return {tier, positive_number(detail)};
  }
  TORCH_CHECK_VALUE(false, "tier='", text, "' is no tier; use 'auto', 'fused', 'chunked' or 'unfused', ",
                    "'chunked:4' for a number of chunks or 'fused:large' for tiles.");
}

TierKey TierKey::shared() const {
  TierKey key = *this;
  (is_column() ? key.n : key.k) = 0;
  return key;
}

std::string TierKey::text() const {
  std::ostringstream text;
  text << op << " rows=" << rows << " n=" << n << " k=" << k << " " << c10::toString(dtype) << " "
       << c10::DeviceTypeName(device, /*lower_case=*/true);
  return text.str();
}

}  // namespace pyruntime
