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
  std::vector<Chunk> gather_order() const;

  // On one host. matmul_reduce_scatter: what others wait for comes first, nearest peer first; the own chunk
  // last, while the others' products travel.
  std::vector<Chunk> scatter_order() const;

 private:
  int64_t rows_;
  int64_t max_rows_;
  int rank_;
  int pieces_;
  std::vector<Chunk> chunks_;
};

}  // namespace pyruntime
