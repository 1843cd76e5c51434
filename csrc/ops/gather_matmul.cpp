// The gathering engine: GEMMs on rows as they arrive. See gather_matmul.h.
#include "ops/gather_matmul.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "ops/gemm/gemm.h"
#include "transport/device_sharing.h"

namespace pyruntime {

std::vector<GatherMatmul::Gemm> GatherMatmul::gemms(const Operand& like, int64_t rows, at::TensorList weights,
                                                    at::TensorList biases) {
  std::vector<Gemm> gemms;
  for (size_t i = 0; i < weights.size(); ++i) {
    gemms.push_back({at::empty({like.blocks, rows * like.inner, weights[i].size(0)}, like.data.options()),
                     weights[i], biases[i]});
  }
  return gemms;
}

GatherMatmul::GatherMatmul(Route route, Op op, const Operand& shard, RowsAre rows)
    : route_(std::move(route)), op_(op), shard_(shard), rows_are_(rows) {
  if (route_.group.world_size() == 1) {
    rows_ = shard.data;
    own_ = {0, 0, shard.rows};
    return;
  }
  publish();
  own_ = flight_->order().front();
  if (route_.tier.tier != Tier::kUnfused) return;
  rows_ = collect();
  finish();  // its memory is free for the GEMMs
}

// Copies this rank's rows into the memory that they leave from.
void GatherMatmul::publish() {
  Transport& transport = route_.group.transport(shard_.data.device());
  context_ = &transport.context();
  inside_.emplace(*context_, op_);
  begun_ = begin_of_op(shard_.data.device());
  const Wire& wire = route_.wire;
  FlightDescriptor descriptor = shard_.flight(op_, route_.rows, wire.travelling_width(shard_.width));
  descriptor.dtype = static_cast<int32_t>(wire.travels_as(shard_.data.scalar_type()));
  descriptor.pieces = route_.tier.chunks;
  descriptor.pass = context_->passes.now();
  descriptor.failed_passes = context_->failed_passes;
  flight_ = transport.gather(descriptor);
  const int64_t first = flight_->order().front().begin;
  const auto own_rows = [&](const at::Tensor& all, const Chunk& chunk) {
    return all.narrow(1, (chunk.begin - first) * shard_.inner, chunk.rows * shard_.inner);
  };
  for (const Chunk& chunk : flight_->own()) {
    {
      const Spending copying(*context_, Entered::kCopy, name_of(op_), /*peer=*/-1, shard_.data.device());
      wire.write(own_rows(shard_.data, chunk), flight_->memory(chunk));
    }
    if (!route_.together) flight_->publish(chunk);
  }
  if (route_.together) flight_->publish_together(flight_->own());
  if (!wire.rounds()) return;
  // Only when all of it has left.
  const Spending rounding(*context_, Entered::kCopy, name_of(op_), /*peer=*/-1, shard_.data.device());
  shard_.data = at::empty_like(shard_.data);
  for (const Chunk& chunk : flight_->own()) wire.read(flight_->memory(chunk), own_rows(shard_.data, chunk));
}

void GatherMatmul::multiply(const std::vector<Gemm>& gemms, bool transposed) {
  if (gemms.empty()) return;
  if (route_.tier.tier == Tier::kChunked && !route_.together) return multiply_chunks(gemms, transposed);
  for (const Gemm& gemm : gemms) {
    if (route_.tier.tier == Tier::kFused) {
      multiply_fused(gemm, transposed);
    } else {
      const int64_t count = gemm.out.size(0) * gemm.out.size(1);
      WeightGemm(gemm.weight, transposed, count).write(gemm.out, rows(), gemm.bias, /*accumulate=*/false);
    }
  }
}

void GatherMatmul::multiply_chunks(const std::vector<Gemm>& gemms, bool transposed) {
  std::vector<WeightGemm> products;
  for (const Gemm& gemm : gemms) {
    products.emplace_back(gemm.weight, transposed, gemm.out.size(0) * gemm.out.size(1));
  }
  for_each_chunk([&](const Chunk& chunk, const at::Tensor& rows) {
    for (size_t i = 0; i < gemms.size(); ++i) {
      products[i].write(shard_.rows_of(gemms[i].out, chunk), rows, gemms[i].bias, /*accumulate=*/false);
    }
  });
}

void GatherMatmul::multiply_fused(const Gemm& gemm, bool transposed) {
  Reading reading(*context_, op_, /*peer=*/-1, begun_, shard_.data.device());
  flight_->multiply({shard_.data.select(0, 0), gemm.weight, transposed, gemm.bias, gemm.out.select(0, 0),
                     route_.tier.tiles});
  const int64_t others = std::exchange(multiplied_, true) ? 0 : route_.rows - own_.rows;  // they come once
  reading.came(others * shard_.inner * shard_.width * shard_.data.element_size());
}

void GatherMatmul::for_each_chunk(
    const std::function<void(const Chunk& chunk, const at::Tensor& rows)>& use) {
  if (!flight_) return use({own_.owner, 0, rows_.size(1) / shard_.inner}, rows_);
  const bool copies = rows_are_ != RowsAre::kPassing && !lent().defined();
  if (copies) rows_ = empty_rows(route_.rows);
  for (const Chunk& part : flight_->order()) {
    const at::Tensor rows = chunk(part);
    use(part, rows);
    if (!copies) continue;
    const Spending copying(*context_, Entered::kCopy, name_of(op_), /*peer=*/-1, shard_.data.device());
    shard_.rows_of(rows_, part).copy_(rows);
  }
}

void GatherMatmul::for_each_in(const Chunk& wanted,
                               const std::function<void(const Chunk& part, const at::Tensor& rows)>& use) {
  if (rows_.defined()) return use(wanted, shard_.rows_of(rows_, wanted));
  const int64_t end = wanted.begin + wanted.rows;
  for (const Chunk& part : flight_->order()) {
    const int64_t from = std::max(wanted.begin, part.begin), to = std::min(end, part.begin + part.rows);
    if (from >= to) continue;
    const at::Tensor rows = chunk(part);
    use({part.owner, from, to - from},
        rows.narrow(1, (from - part.begin) * shard_.inner, (to - from) * shard_.inner));
  }
}

const at::Tensor& GatherMatmul::rows() {
  if (!rows_.defined()) rows_ = collect();
  return rows_;
}

at::Tensor GatherMatmul::lent() const {
  const bool are_read_here =
      rows_are_ == RowsAre::kLent || (rows_are_ == RowsAre::kPassing && route_.together);
  const bool may_stay = are_read_here && route_.tier.tier != Tier::kUnfused && flight_;
  return may_stay ? in_order() : at::Tensor();
}

at::Tensor GatherMatmul::in_order() const {
  const at::Tensor& own = shard_.data;
  if (own.is_cpu() || route_.wire.rounds() || shard_.blocks != 1) return {};
  const int64_t row_bytes = shard_.inner * shard_.width * own.element_size();
  char* first = nullptr;
  for (const Chunk& part : flight_->order()) {
    if (part.rows == 0) continue;
    char* begin = static_cast<char*>(flight_->memory(part).mutable_data_ptr()) - part.begin * row_bytes;
    if (first != nullptr && begin != first) return {};
    first = begin;
  }
  if (first == nullptr) return {};
  return at::for_blob(first, {1, route_.rows * shard_.inner, shard_.width})
      .options(own.options())
      .target_device(own.device())
      .make_tensor();
}

at::Tensor GatherMatmul::collect() {
  if (at::Tensor all = lent(); all.defined()) {
    wait_for_all();
    return all;
  }
  at::Tensor all = empty_rows(route_.rows);
  if (const at::Tensor here = in_order(); here.defined()) {
    wait_for_all();
    const Spending copying(*context_, Entered::kCopy, name_of(op_), /*peer=*/-1, shard_.data.device());
    return all.copy_(here);
  }
  for (const Chunk& part : flight_->order()) read(part, shard_.rows_of(all, part));
  return all;
}

void GatherMatmul::wait_for_all() {
  std::vector<Chunk> others;
  int64_t bytes = 0;
  for (const Chunk& part : flight_->order()) {
    // An empty piece begins where the next one does.
    if (part.owner == own_.owner || part.rows == 0 || !counted_.insert(part.begin).second) continue;
    others.push_back(part);
    bytes += static_cast<int64_t>(flight_->memory(part).nbytes());
  }
  if (others.empty()) return;
  Reading reading(*context_, op_, others.size() == 1 ? others[0].owner : -1, begun_, shard_.data.device());
  flight_->wait_together(others);
  reading.came(bytes, flight_->travelled(others.back()));
}

at::Tensor GatherMatmul::other_rows() {
  at::Tensor others = empty_rows(route_.rows - own_.rows);
  for (const Chunk& part : flight_->order()) {
    if (part.owner == own_.owner) continue;
    Chunk place = part;
    if (part.begin > own_.begin) place.begin -= own_.rows;
    read(part, shard_.rows_of(others, place));
  }
  return others;
}

void GatherMatmul::finish() {
  if (!flight_) return;
  inside_->check();
  flight_->finish();
  flight_.reset();
  inside_.reset();
}

at::Tensor GatherMatmul::arrived(const Chunk& chunk) {
  Reading reading(*context_, op_, chunk.owner, begun_, shard_.data.device());
  flight_->wait(chunk);
  at::Tensor rows = flight_->memory(chunk);
  const bool is_new = chunk.rows > 0 && counted_.insert(chunk.begin).second;
  reading.came(is_new ? static_cast<int64_t>(rows.nbytes()) : 0, flight_->travelled(chunk));
  return rows;
}

at::Tensor GatherMatmul::chunk(const Chunk& chunk) {
  if (chunk.owner == own_.owner) return shard_.data;
  if (!route_.wire.rounds()) return arrived(chunk);
  at::Tensor rows = empty_rows(chunk.rows);
  read(chunk, rows);
  return rows;
}

void GatherMatmul::read(const Chunk& chunk, const at::Tensor& out) {
  const bool is_own = chunk.owner == own_.owner;
  const at::Tensor rows = is_own ? shard_.data : arrived(chunk);
  const Spending copying(*context_, Entered::kCopy, name_of(op_), /*peer=*/-1, shard_.data.device());
  if (is_own) {
    out.copy_(rows);
  } else {
    route_.wire.read(rows, out);
  }
}

at::Tensor GatherMatmul::empty_rows(int64_t rows) const {
  if (memory_ && rows == route_.rows) return memory_();
  return at::empty({shard_.blocks, rows * shard_.inner, shard_.width}, shard_.data.options());
}

}  // namespace pyruntime
