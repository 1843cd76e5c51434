#include "transport/descriptor.h"

#include <iterator>
#include <sstream>

namespace pyruntime {

const char* name_of(Op op) {
  constexpr const char* kNames[] = {"all_gather",
                                    "reduce_scatter",
                                    "all_reduce",
                                    "all_gather_matmul",
                                    "matmul_reduce_scatter",
                                    "matmul_all_reduce",
                                    "send",
                                    "all_to_all",
                                    "deal"};
  const auto at = static_cast<size_t>(op) - static_cast<size_t>(Op::kAllGather);
  return at < std::size(kNames) ? kNames[at] : "unknown op";
}

int64_t FlightDescriptor::row_bytes() const {
  return row_elements() * static_cast<int64_t>(c10::elementSize(scalar_type()));
}

FlightDescriptor FlightDescriptor::of_some(const std::vector<int64_t>& rows) const {
  uint64_t digest = 14695981039346656037ULL;  // FNV-1a
  for (const int64_t row : rows) digest = (digest ^ static_cast<uint64_t>(row)) * 1099511628211ULL;
  FlightDescriptor some = *this;
  some.rows = static_cast<int64_t>(rows.size());
  some.agreement = static_cast<int64_t>(digest);
  return some;
}

bool FlightDescriptor::agrees_with(const FlightDescriptor& other) const {
  return other.op == op && other.dtype == dtype && other.rows == rows && other.row_blocks == row_blocks &&
         other.with_bias == with_bias && other.holder == holder && other.agreement == agreement &&
         other.pieces == pieces && other.pass == pass && other.failed_passes == failed_passes &&
         other.inner * other.width == inner * width;
}

std::string FlightDescriptor::text() const {
  std::ostringstream text;
  text << name_of(op) << " with ";
  if (rows == kUnknownRows) {
    text << own_rows << " rows on this rank";
  } else {
    text << rows << " rows in all";
  }
  text << " (in " << row_blocks << " blocks) of " << inner * width << " " << c10::toString(scalar_type())
       << (with_bias ? " and a bias" : "");
  if (pieces != 0) text << ", each rank's rows in " << pieces << " chunks";
  if (failed_passes != 0) {
    text << ", after " << failed_passes
         << (failed_passes == 1 ? " pass that an exception ended" : " passes that exceptions ended");
  }
  if (agreement != 0) text << ", its other arguments having the digest " << agreement;
  return text.str();
}

}  // namespace pyruntime
