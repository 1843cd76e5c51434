// The rows that a router has sent to this rank's experts, in the order in which they are kept: by expert,
// then by row over all ranks. So each rank's rows lie together within an expert, and no sum depends on how
// rows are cut into chunks.
//
// If `pads`, an expert has a few places more than rows, so that products have few different numbers of rows,
// for each of which a library would prepare anew (ops/gemm/gemm.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/chunk_plan.h"

namespace pyruntime {

class ExpertRows {
 public:
  // table [rows, 2k] of all ranks: the experts of each row, which differ (-1: none), then the weight of each.
  // This rank has the experts first, first + 1, ..., `count` of them. On a device the host waits for the
  // table.
  ExpertRows(const at::Tensor& table, int64_t first, int64_t count, bool pads);

  // Consecutive places in the order.
  struct Run {
    int64_t begin = 0, count = 0;

    bool is_empty() const { return count == 0; }
    at::Tensor of(const at::Tensor& all) const { return all.narrow(0, begin, count); }
  };

  int64_t experts() const { return static_cast<int64_t>(counts_.size()); }
  // All places.
  int64_t size() const { return begins_.back(); }
  // The end of each expert's places, for the experts of this rank.
  std::vector<int64_t> ends() const { return {begins_.begin() + 1, begins_.end()}; }
  // The places of all experts.
  Run all() const { return {0, size()}; }
  // All rows of an expert of this rank, counted from 0; those of a chunk; all its places.
  Run of(int64_t expert) const { return {begins_[expert], counts_[expert]}; }
  Run of(int64_t expert, const Chunk& chunk) const;
  Run places_of(int64_t expert) const { return {begins_[expert], begins_[expert + 1] - begins_[expert]}; }
  // The number of places for so many rows.
  int64_t padded(int64_t rows) const;
  // Writes zeros to the places of `values` [size(), *] without a row.
  void clear_padding(const at::Tensor& values) const;
  // Writes to out [chunk.rows, D] the sum of each row's `values` [size(), D], in the order of its experts. On
  // a CPU.
  void sum(const at::Tensor& values, const Chunk& chunk, const at::Tensor& out) const;
  // The same of all rows, in one launch. On a device.
  at::Tensor sums(const at::Tensor& values) const;

  // [size()]: each row's number over all ranks; its weight; its place in the table's weights, row * k + slot.
  // Without a row: 0.
  const at::Tensor& rows() const { return rows_; }
  const at::Tensor& weights() const { return weights_; }
  const at::Tensor& places() const { return places_; }

 private:
  bool pads_;
  std::vector<int64_t> begins_;    // of each expert's places, and the end
  std::vector<int64_t> counts_;    // of its rows
  std::vector<int64_t> in_order_;  // rows_, on the host
  at::Tensor rows_, weights_, places_;
  // The places in that order that hold row r of all ranks are of_row_[row_begins_[r]] up to row_begins_[r +
  // 1].
  at::Tensor row_begins_, of_row_;
};

}  // namespace pyruntime
