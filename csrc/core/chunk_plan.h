// How the rows of an operand are cut over ranks, and in which order each rank visits the chunks.
#pragma once

#include <cstdint>
#include <vector>

namespace pyruntime {

// All rows of one rank, or some of the pieces that they travel in.
struct Chunk {
  int owner;         // the rank whose rows these are
  int64_t begin;     // first row
  int64_t rows;      // number of rows, 0 when there are fewer rows than ranks or pieces
  int piece = kAll;  // which of the owner's pieces
  int pieces = 1;    // how many, from that one on

  static constexpr int kAll = -1;
  bool is_whole() const { return piece == kAll; }
};

// In place of a rank that holds all rows: every rank holds its share.
inline constexpr int kEveryRank = -1;

// Rows that rank `rank` of `world_size` holds of `rows`.
int64_t rows_of_rank(int64_t rows, int world_size, int rank, int holder = kEveryRank);

// Rows are cut as torch.tensor_split cuts them: rank r of P holds rows / P + (r < rows % P) rows, for any
// rows >= 0; or one rank holds them all. Each rank's rows are cut into `pieces` as torch.tensor_split does.
class ChunkPlan {
 public:
  ChunkPlan(int64_t rows, int world_size, int rank, int pieces = 1, int holder = kEveryRank);

  // Of some of these rows, `rows` in ascending order, numbered anew from 0. Every rank keeps its own, and
  // what lay in the first half of its pieces lies in the first half of the new `pieces`, where both numbers
  // are even: on a ring it goes the same way round, so that it is summed in the same order.
  ChunkPlan of_some(const std::vector<int64_t>& rows, int pieces) const;

  int64_t rows() const { return rows_; }
  int world_size() const { return static_cast<int>(chunks_.size()); }
  const Chunk& of(int rank) const { return chunks_[rank]; }
  const Chunk& own() const { return chunks_[rank_]; }
  int64_t max_rows() const { return max_rows_; }  // of any rank
  int pieces() const { return pieces_; }
  Chunk piece(int owner, int piece) const { return run(owner, piece, 1); }
  // `count` pieces, one after the other.
  Chunk run(int owner, int first, int count) const;

  // On one host. all_gather_matmul: the own chunk needs no wait and comes first; then rank + 1, rank + 2,
  // ..., so that no two ranks pull from the same peer at once.
  std::vector<Chunk> gather_order() const { return order_from(rank_); }

  // On one host. matmul_reduce_scatter: what others wait for comes first, nearest peer first; the own chunk
  // last, while the others' GEMMs travel.
  std::vector<Chunk> scatter_order() const { return order_from(rank_ + 1); }

 private:
  // All ranks' rows, those of `owner` first.
  std::vector<Chunk> order_from(int owner) const;

  int64_t rows_;
  int64_t max_rows_;
  int rank_;
  int pieces_;
  std::vector<Chunk> chunks_;
  // Of some rows: where each owner's first half of pieces ends. Empty: in the middle.
  std::vector<int64_t> halves_;
};

}  // namespace pyruntime
