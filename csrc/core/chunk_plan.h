// Cuts the rows of an operand over ranks, and gives the order in which each rank visits the chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyruntime {

// All rows of one rank, or some of the pieces that its rows travel in.
struct Chunk {
  int owner;         // the rank whose rows these are
  int64_t begin;     // first row
  int64_t rows;      // number of rows, 0 when there are fewer rows than ranks or pieces
  int piece = kAll;  // which of the owner's pieces
  int pieces = 1;    // how many pieces, from that one on

  static constexpr int kAll = -1;
  bool is_whole() const { return piece == kAll; }
};

// `holder` if every rank holds its share, instead of one rank holding all rows.
inline constexpr int kEveryRank = -1;

// The rows of rank `rank` out of `rows`.
int64_t rows_of_rank(int64_t rows, int world_size, int rank, int holder = kEveryRank);

// The plan of one operand, for any rows >= 0. Rows are cut as torch.tensor_split cuts them: of P ranks, rank
// r has rows / P + (r < rows % P) rows. Or one rank, `holder`, has them all. Each rank's rows are cut into
// `pieces` by the same rule.
class ChunkPlan {
 public:
  ChunkPlan(int64_t rows, int world_size, int rank, int pieces = 1, int holder = kEveryRank);

  // The plan of some of these rows: `rows`, in ascending order, numbered anew from 0. Every rank keeps its
  // own. If both numbers of pieces are even, rows in the first half of their owner's pieces stay in the first
  // half of the new `pieces`: on a ring they travel the same way round and are summed in the same order.
  ChunkPlan of_some(const std::vector<int64_t>& rows, int pieces) const;

  int64_t rows() const { return rows_; }
  int world_size() const { return static_cast<int>(chunks_.size()); }
  const Chunk& of(int rank) const { return chunks_[rank]; }
  const Chunk& own() const { return chunks_[rank_]; }
  int64_t max_rows() const { return max_rows_; }  // the most rows of any rank
  int pieces() const { return pieces_; }
  Chunk piece(int owner, int piece) const { return run(owner, piece, 1); }
  // `count` pieces, one after the other.
  Chunk run(int owner, int first, int count) const;

  // On one host, for all_gather_matmul: the own chunk needs no wait and comes first, then rank + 1, rank + 2,
  // ..., so that no two ranks pull from the same peer at once.
  std::vector<Chunk> gather_order() const { return order_from(rank_); }

  // On one host, for matmul_reduce_scatter: first what others wait for, the nearest peer first. The own chunk
  // comes last, while the others' GEMMs travel.
  std::vector<Chunk> scatter_order() const { return order_from(rank_ + 1); }

 private:
  // All ranks' rows, those of `owner` first.
  std::vector<Chunk> order_from(int owner) const;

  int64_t rows_;
  int64_t max_rows_;
  int rank_;
  int pieces_;
  std::vector<Chunk> chunks_;
  // Only in a plan of some rows: where the first half of each owner's pieces ends. Empty: in the middle.
  std::vector<int64_t> halves_;
};

// The places in `order` of chunks whose rows follow one another, and whose memory does. `memory`: of each
// chunk. In a run of them, and by their first ones, they stand as in `order`. An empty chunk belongs to its
// neighbour before it, or else behind it.
std::vector<std::vector<std::size_t>> joined(const std::vector<Chunk>& order,
                                             const std::vector<const char*>& memory, int64_t row_bytes);

}  // namespace pyruntime
