// The rows that a router has sent to this rank's experts, in the order in which they are kept: by expert,
// then by row over all ranks. So each rank's rows lie together within an expert, and no sum depends on how
// rows are cut into chunks.
//
// If `pads`, an expert has a few places more than rows, so that products have few different numbers of rows,
// for each of which a library would prepare anew (ops/gemm/gemm.h).
//
// On a device kernels make the order, and the host reads only how many rows each expert has: it waits for
// these numbers when they are first asked for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/chunk_plan.h"
#include "ops/experts/sorted_places.h"
#include "ops/gemm/groups.h"

namespace pyruntime {

class ExpertRows {
 public:
  // table [rows, 2k] of all ranks: the experts of each row, which differ (-1: none), then the weight of each.
  // This rank has the experts first, first + 1, ..., `count` of them. Without kernels for the table, and for
  // fp64, the host makes the order, and waits for the table.
  ExpertRows(const at::Tensor& table, int64_t first, int64_t count, bool pads);

  // Consecutive places in the order.
  struct Run {
    int64_t begin = 0, count = 0;

    bool is_empty() const { return count == 0; }
    at::Tensor of(const at::Tensor& all) const { return all.narrow(0, begin, count); }
  };

  int64_t experts() const { return experts_; }
  // All places.
  int64_t size() const { return begins().back(); }
  // The end of each expert's places, for the experts of this rank.
  Ends ends() const { return {begins().begin() + 1, begins().end()}; }
  // The same for products of all experts in one launch (ops/gemm/groups.h).
  const at::Tensor& ends_on_device() const;
  // The places of all experts.
  Run all() const { return {0, size()}; }
  // All rows of an expert of this rank, counted from 0; those of a chunk; all its places.
  Run of(int64_t expert) const { return {begins()[expert], counts_[expert]}; }
  Run of(int64_t expert, const Chunk& chunk) const;
  Run places_of(int64_t expert) const { return {begins()[expert], begins()[expert + 1] - begins()[expert]}; }
  // The number of places for so many rows.
  int64_t padded(int64_t rows) const;
  // Writes zeros to the places of `values` [size(), *] without a row.
  void clear_padding(const at::Tensor& values) const;
  // Writes to out [chunk.rows, D], contiguous, the sum of each row's `values` [size(), D], in the order of
  // its experts.
  void sum(const at::Tensor& values, const Chunk& chunk, const at::Tensor& out) const;
  // The same of some rows. Only by kernels.
  void sum(const at::Tensor& values, const at::Tensor& rows, const at::Tensor& out) const;

  // [size()]: each row's number over all ranks; its weight; its place in the table's weights, row * k + slot.
  // Without a row: 0.
  at::Tensor rows() const { return rows_.narrow(0, 0, size()); }
  at::Tensor weights() const { return weights_.narrow(0, 0, size()); }
  at::Tensor places() const { return places_.narrow(0, 0, size()); }

 private:
  void sort_on_host(const at::Tensor& table, int64_t first);
  void sort_on_device(const DeviceLibrary& kernels, const at::Tensor& table, int64_t first);
  const std::vector<int64_t>& begins() const;
  void set(std::vector<int64_t> counts) const;

  bool pads_;
  int64_t experts_;
  mutable std::vector<int64_t> begins_;  // of each expert's places, and the end; empty: not read yet
  mutable std::vector<int64_t> counts_;  // of its rows
  std::vector<int64_t> in_order_;        // rows_, on the host
  at::Tensor rows_, weights_, places_;   // by kernels: larger than size()
  std::optional<SortedPlaces> sorted_;   // by kernels
  at::Tensor counts_on_host_;            // counts_ on its way to the host, until `is_here_`
  std::unique_ptr<c10::Event> is_here_;
  mutable at::Tensor ends_on_device_;  // undefined: not asked for yet
  // By the host: the places in that order that hold row r of all ranks are of_row_[row_begins_[r]] up to
  // row_begins_[r + 1].
  at::Tensor row_begins_, of_row_;
};

}  // namespace pyruntime
