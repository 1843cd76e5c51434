#include "transport/transport.h"

#include <c10/core/ScalarType.h>

#include <sstream>

namespace pyruntime {

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kAllGatherMatmul:
      return "all_gather_matmul";
    case Op::kMatmulReduceScatter:
      return "matmul_reduce_scatter";
    case Op::kMatmulAllReduce:
      return "matmul_all_reduce";
    case Op::kSend:
      return "send";
  }
  return "unknown op";
}

void GatherFlight::multiply(const FusedProduct&) {
  TORCH_CHECK(false, "This transport has no fused kernels: ask Transport::why_not_fused() first.");
}

void ScatterFlight::multiply(const FusedProduct&) {
  TORCH_CHECK(false, "This transport has no fused kernels: ask Transport::why_not_fused() first.");
}

std::string Transport::why_not_fused(const FlightDescriptor&) const {
  return "there are fused kernels for devices of one host only, and the group's chunks travel by " +
         description();
}

std::string Transport::why_not_pieces(int) const {
  return "the number of chunks is no choice where they travel by " + description();
}

int64_t FlightDescriptor::row_bytes() const {
  return row_elements() * static_cast<int64_t>(c10::elementSize(scalar_type()));
}

bool FlightDescriptor::agrees_with(const FlightDescriptor& other) const {
  return other.op == op && other.dtype == dtype && other.rows == rows && other.row_blocks == row_blocks &&
         other.with_bias == with_bias && other.holder == holder && other.agreement == agreement &&
         other.pieces == pieces && other.inner * other.width == inner * width;
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
  if (agreement != 0) text << ", its other arguments having the digest " << agreement;
  return text.str();
}

}  // namespace pyruntime
