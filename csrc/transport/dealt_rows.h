// Rows that are dealt: each rank sends some of its own to each rank, and all ranks know how many.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace pyruntime {

class DealtRows {
 public:
  // counts [ranks, ranks], row-major and the same on all ranks: rank s sends counts[s, r] rows to rank r.
  // Raises ValueError for counts that are not so many, or below 0.
  DealtRows(std::vector<int64_t> counts, int ranks) : counts_(std::move(counts)), ranks_(ranks) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(counts_.size()) == int64_t{ranks} * ranks &&
                          std::ranges::all_of(counts_, [](int64_t count) { return count >= 0; }),
                      "Rows are dealt by ", counts_.size(), " counts; a group of ", ranks, " ranks needs ",
                      int64_t{ranks} * ranks, " that are at least 0, one for each rank and each receiver.");
  }

  int64_t count(int from, int to) const { return counts_[int64_t{from} * ranks_ + to]; }
  // The first row for rank `to` among those that rank `from` sends, and all of these.
  int64_t leaving_at(int from, int to) const {
    int64_t rows = 0;
    for (int rank = 0; rank < to; ++rank) rows += count(from, rank);
    return rows;
  }
  int64_t leaving(int from) const { return leaving_at(from, ranks_); }
  // The first row of rank `from` among those that come to rank `to`, and all of these.
  int64_t arriving_at(int from, int to) const {
    int64_t rows = 0;
    for (int rank = 0; rank < from; ++rank) rows += count(rank, to);
    return rows;
  }
  int64_t arriving(int to) const { return arriving_at(ranks_, to); }
  // The most rows that come to a rank.
  int64_t most_arriving() const {
    int64_t most = 0;
    for (int rank = 0; rank < ranks_; ++rank) most = std::max(most, arriving(rank));
    return most;
  }
  // As many rows the other way.
  DealtRows back() const {
    std::vector<int64_t> turned(counts_.size());
    for (int from = 0; from < ranks_; ++from) {
      for (int to = 0; to < ranks_; ++to) turned[int64_t{to} * ranks_ + from] = count(from, to);
    }
    return {std::move(turned), ranks_};
  }

 private:
  std::vector<int64_t> counts_;
  int ranks_;
};

}  // namespace pyruntime
