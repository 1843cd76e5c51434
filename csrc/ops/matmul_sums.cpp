#include "ops/matmul_sums.h"

#include <utility>

namespace pyruntime {

namespace {

// Must be less than a group's number of slots.
constexpr size_t kMostUnderWay = 3;

}  // namespace

MatmulSums::MatmulSums(Route route, std::vector<Gemm> gemms, bool transposed)
    : route_(std::move(route)), gemms_(std::move(gemms)), transposed_(transposed) {
  for (const Gemm& gemm : gemms_) {
    products_.emplace_back().emplace_back(gemm.weight, transposed, gemm.out.size(0) * gemm.out.size(1));
  }
}

void MatmulSums::multiply(const Operand& like, const Chunk& chunk, const at::Tensor& rows) {
  if (chunk.rows == 0) return;
  Operand operand = like;
  operand.data = rows;
  operand.rows = chunk.rows;
  for (size_t i = 0; i < gemms_.size(); ++i) {
    if (under_way_.size() == kMostUnderWay) take_oldest();
    MatmulScatter::Parts parts{{operand}, {gemms_[i].weight}, transposed_, gemms_[i].bias, &products_[i]};
    under_way_.push_back(
        {MatmulScatter(route_, std::move(parts), /*all=*/true), like.rows_of(gemms_[i].out, chunk)});
    for (Sum& sum : under_way_) sum.parts.reduce_if_come();
  }
}

void MatmulSums::take_oldest() {
  under_way_.front().parts.finish(under_way_.front().out);
  under_way_.pop_front();
}

void MatmulSums::finish() {
  for (Sum& sum : under_way_) sum.parts.reduce();
  while (!under_way_.empty()) take_oldest();
}

}  // namespace pyruntime
