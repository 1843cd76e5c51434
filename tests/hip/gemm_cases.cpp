// GEMMs of one rank, gathers and scatters of several, put, await and finish: each against fp64.
#include "gemm_cases.h"

#include <algorithm>
#include <memory>

namespace run {

namespace {

const char* dtype_name(int dtype) {
  return dtype == PYRUNTIME_BF16 ? "bf16" : dtype == PYRUNTIME_FP16 ? "fp16" : "fp32";
}

int64_t padded(int64_t width) {
  return (width + 7) / 8 * 8;
}

struct Cut {
  int64_t begin, rows;
};

// As torch.tensor_split cuts rows.
Cut cut(int64_t rows, int parts, int part) {
  const int64_t each = rows / parts, longer = rows % parts;
  return {part * each + std::min<int64_t>(part, longer), each + (part < longer ? 1 : 0)};
}

// C in fp64, and the sum of |a b|, which bounds the rounding of sums.
struct Product {
  std::vector<double> c, size;

  template <class T>
  Product(int layout, int64_t m, int64_t n, int64_t k, const std::vector<T>& a, int64_t lda,
          const std::vector<T>& b, int64_t ldb)
      : c(m * n), size(m * n) {
    std::vector<double> left(m * k), right(n * k);
    for (int64_t i = 0; i < m * k; ++i) left[i] = value(a[i / k * lda + i % k]);
    for (int64_t i = 0; i < n * k; ++i) {
      const int64_t j = i / k, e = i % k;
      right[i] = value(layout == PYRUNTIME_NT ? b[j * ldb + e] : b[e * ldb + j]);
    }
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, absolute = 0;
        for (int64_t e = 0; e < k; ++e) {
          const double one = left[i * k + e] * right[j * k + e];
          sum += one;
          absolute += std::fabs(one);
        }
        c[i * n + j] = sum;
        size[i * n + j] = absolute;
      }
    }
  }

  template <class T>
  double allowed(int64_t at) const {
    return unit<T>() * std::fabs(c[at]) + 1e-5 * (1 + size[at]);
  }
};

struct Sizes {
  int layout, tiles;
  int64_t m, n, k;
  int64_t spare = 0;  // elements between rows
  int64_t shift = 0;  // of the first element from an aligned address
  bool bias = false;
  bool around = false;  // rows come around a ring of all ranks, in two pieces

  std::string name(int dtype) const {
    return std::string(layout == PYRUNTIME_NT ? "NT " : "NN ") + dtype_name(dtype) +
           (tiles == PYRUNTIME_TILES_LARGE ? " large " : " small ") + std::to_string(m) + "x" +
           std::to_string(n) + "x" + std::to_string(k) + (spare + shift > 0 ? " unaligned" : "") +
           (bias ? " bias" : "");
  }
};

// C = A B by a group of one rank, on `workspaces` of its own.
void multiply(Rank& rank, const PyruntimeMatmul& matmul) {
  const PyruntimeWorkspace shape{1, 1, 2 * matmul.m * padded(matmul.k)};
  device::Handle unused;
  void* base = device::allocate_shared(pyruntime_workspace_bytes(&shape), unused);
  ok(pyruntime_prepare_workspace(&shape, base, rank.stream()));
  const PyruntimeGroup group{shape, 0, 0, kPatience, &base, 0, 0, nullptr};
  ok(pyruntime_all_gather_matmul(&group, &matmul, rank.stream()));
  expect_no_failure(rank, group);
}

template <class T>
void gemm(Rank& rank, const Sizes& s) {
  const int64_t lda = s.k + s.spare, ldb = (s.layout == PYRUNTIME_NT ? s.k : s.n) + s.spare,
                ldc = s.n + s.spare, lines = s.layout == PYRUNTIME_NT ? s.n : s.k;
  std::vector<T> a = random_values<T>(s.m * lda, 1), b = random_values<T>(lines * ldb, 2);
  const std::vector<T> bias = random_values<T>(s.n, 3);
  // What pads a row must never be read into a sum.
  const auto spoil = [&](std::vector<T>& matrix, int64_t pitch) {
    for (size_t i = 0; i < matrix.size(); ++i) {
      if (static_cast<int64_t>(i) % pitch >= pitch - s.spare) matrix[i].bits = 0xffff;
    }
  };
  spoil(a, lda);
  spoil(b, ldb);
  const Buffer<T> on_a(a, s.shift), on_b(b, s.shift), on_bias(bias), c(s.m * ldc, s.shift);
  multiply(rank, {dtype_of<T>(), s.layout, s.tiles, s.m, s.n, s.k, on_a.data(), on_b.data(),
                  s.bias ? on_bias.data() : nullptr, c.data(), lda, ldb, ldc, 0, 0});
  const Product wanted(s.layout, s.m, s.n, s.k, a, lda, b, ldb);
  const auto with_bias = [&](int64_t i, int64_t j) {
    return wanted.c[i * s.n + j] + (s.bias ? value(bias[j]) : 0);
  };
  expect_close("c", c.read(), s.m, s.n, ldc, with_bias, [&](int64_t i, int64_t j) {
    return wanted.allowed<T>(i * s.n + j) + unit<T>() * std::fabs(with_bias(i, j));
  });
  on_a.read(), on_b.read();  // their guards
}

// ---- several ranks; `round` names the operands, which all ranks can draw ----

template <class T>
class Gather {
 public:
  Gather(Rank& rank, const Sizes& sizes, int pieces, int rounds)
      : rank_(rank),
        s_(sizes),
        pieces_(pieces),
        lda_(padded(s_.k)),
        own_(cut(s_.m, rank.world_size(), rank.rank())),
        workspaces_(rank, {rank.world_size(), pieces, s_.m * lda_ * 2}) {
    for (int next = 0; next < rank.world_size(); ++next) ring_.push_back(next);
    for (int round = 0; round < rounds; ++round) {
      whole_.push_back(random_values<T>(s_.m * lda_, 10 * round));
      weight_.push_back(random_values<T>(s_.n * s_.k, 10 * round + 1));
      const auto begin = whole_.back().begin() + own_.begin * lda_;
      shard_.push_back(std::make_unique<Buffer<T>>(std::vector<T>(begin, begin + own_.rows * lda_)));
      on_weight_.push_back(std::make_unique<Buffer<T>>(weight_.back()));
      c_.push_back(std::make_unique<Buffer<T>>(s_.m * s_.n));
    }
  }

  const Workspaces& workspaces() const { return workspaces_; }

  // Puts this rank's rows, the peer first that needs them first, and multiplies.
  PyruntimeGroup begin(int round, int64_t deadline_ns = kPatience) {
    PyruntimeGroup group = workspaces_.group(round % PYRUNTIME_SLOTS, deadline_ns);
    if (s_.around) {
      group.pieces = 2;
      group.rings = 1;
      group.ring_orders = ring_.data();
      put_around(group, round);
    } else {
      put(group, round);
    }
    const int64_t ldb = s_.layout == PYRUNTIME_NT ? s_.k : s_.n;
    const PyruntimeMatmul matmul{dtype_of<T>(),
                                 s_.layout,
                                 s_.tiles,
                                 s_.m,
                                 s_.n,
                                 s_.k,
                                 shard_[round]->data(),
                                 on_weight_[round]->data(),
                                 nullptr,
                                 c_[round]->data(),
                                 lda_,
                                 ldb,
                                 s_.n,
                                 rank_.most_blocks(),
                                 0};
    ok(pyruntime_all_gather_matmul(&group, &matmul, rank_.stream()));
    return group;
  }

  void put(const PyruntimeGroup& group, int round) {
    const int world = rank_.world_size(), me = rank_.rank();
    const int64_t row_bytes = lda_ * 2;
    for (int step = 1; step < world; ++step) {
      for (int i = 0; i < pieces_; ++i) {
        const Cut piece = cut(own_.rows, pieces_, i);
        ok(pyruntime_put(&group, shard_[round]->data() + piece.begin * lda_, piece.rows * row_bytes,
                         (me + world - step) % world, (own_.begin + piece.begin) * row_bytes, i, 1,
                         rank_.stream()));
      }
    }
    ok(pyruntime_end_puts(&group, rank_.stream()));
  }

  // Half of this rank's rows to each neighbour, which passes them on. Ranks wait for each other on the host:
  // their streams may share a queue, and a wait must not come before what it waits for.
  void put_around(const PyruntimeGroup& group, int round) {
    const int world = rank_.world_size(), me = rank_.rank();
    const int64_t row_bytes = lda_ * 2;
    for (int step = 0; step + 1 < world; ++step) {
      rank_.barrier();
      for (int way = 0; way < 2; ++way) {
        const int on = way == 0 ? 1 : world - 1, owner = (me + step * (world - on)) % world;
        const Cut rows = cut(s_.m, world, owner), piece = cut(rows.rows, 2, way);
        const int64_t bytes = piece.rows * row_bytes, offset = (rows.begin + piece.begin) * row_bytes;
        if (step == 0) {
          ok(pyruntime_put(&group, shard_[round]->data() + piece.begin * lda_, bytes, (me + on) % world,
                           offset, way, 1, rank_.stream()));
        } else {
          ok(pyruntime_pass_on(&group, owner, bytes, (me + on) % world, offset, way, 1, rank_.stream()));
        }
      }
    }
    ok(pyruntime_end_puts(&group, rank_.stream()));
  }

  void finish(const PyruntimeGroup& group) { ok(pyruntime_finish(&group, rank_.stream())); }

  void check(int round) const {
    const int64_t ldb = s_.layout == PYRUNTIME_NT ? s_.k : s_.n;
    const Product wanted(s_.layout, s_.m, s_.n, s_.k, whole_[round], lda_, weight_[round], ldb);
    expect_close(
        "round " + std::to_string(round), c_[round]->read(), s_.m, s_.n, s_.n,
        [&](int64_t i, int64_t j) { return wanted.c[i * s_.n + j]; },
        [&](int64_t i, int64_t j) { return wanted.allowed<T>(i * s_.n + j); });
    workspaces_.check_guards();
  }

  // Rows of a rank that did not come.
  void check_untouched(int round, int absent) const {
    const std::vector<T> seen = c_[round]->read();
    const Cut rows = cut(s_.m, rank_.world_size(), absent);
    for (int64_t i = rows.begin * s_.n; i < (rows.begin + rows.rows) * s_.n; ++i) {
      require(is_poison(seen[i]), "rows that never came were written");
    }
  }

 private:
  Rank& rank_;
  Sizes s_;
  int pieces_;
  int64_t lda_;
  Cut own_;
  Workspaces workspaces_;
  std::vector<int32_t> ring_;
  std::vector<std::vector<T>> whole_, weight_;
  std::vector<std::unique_ptr<Buffer<T>>> shard_, on_weight_, c_;
};

template <class T>
class Scatter {
 public:
  Scatter(Rank& rank, const Sizes& sizes, int rounds)
      : rank_(rank),
        s_(sizes),
        own_(cut(s_.m, rank.world_size(), rank.rank())),
        workspaces_(rank, shape()),
        bias_(random_values<T>(s_.n, 77)),
        on_bias_(bias_) {
    for (int round = 0; round < rounds; ++round) {
      on_a_.push_back(std::make_unique<Buffer<T>>(a(round, rank.rank())));
      on_b_.push_back(std::make_unique<Buffer<T>>(b(round, rank.rank())));
      c_.push_back(std::make_unique<Buffer<T>>(own_.rows * s_.n));
    }
  }

  const Workspaces& workspaces() const { return workspaces_; }

  PyruntimeGroup begin(int round, int64_t deadline_ns = kPatience) {
    const PyruntimeGroup group = workspaces_.group(round % PYRUNTIME_SLOTS, deadline_ns);
    PyruntimeMatmul matmul = request(*on_a_[round], *on_b_[round], c_[round]->data());
    matmul.bias = s_.bias ? on_bias_.data() : nullptr;
    ok(pyruntime_matmul_reduce_scatter(&group, &matmul, rank_.stream()));
    return group;
  }

  void finish(const PyruntimeGroup& group) { ok(pyruntime_end_puts(&group, rank_.stream())); }

  // Bit for bit: parts are rounded, then summed in rank order in fp32, then rounded; against fp64 within what
  // these roundings allow.
  void check(int round) const {
    const int64_t count = own_.rows * s_.n, first = own_.begin * s_.n;
    std::vector<float> sums(count);
    std::vector<double> exact(count), allowed(count);
    for (int source = 0; source < rank_.world_size(); ++source) {
      const std::vector<T> left = a(round, source), right = b(round, source);
      const Buffer<T> on_left(left), on_right(right), part(s_.m * s_.n);
      multiply(rank_, request(on_left, on_right, part.data()));
      const std::vector<T> parts = part.read();
      const Product wanted(s_.layout, s_.m, s_.n, s_.k, left, s_.k, right, ldb());
      for (int64_t i = 0; i < count; ++i) {
        sums[i] += static_cast<float>(value(parts[first + i]));
        exact[i] += wanted.c[first + i];
        allowed[i] += wanted.allowed<T>(first + i);
      }
    }
    const std::vector<T> seen = c_[round]->read();
    for (int64_t i = 0; i < count; ++i) {
      if (s_.bias) {
        sums[i] += static_cast<float>(value(bias_[i % s_.n]));
        exact[i] += value(bias_[i % s_.n]);
      }
      allowed[i] += unit<T>() * (std::fabs(exact[i]) + allowed[i]);
      require(same_bits(seen[i], rounded<T>(sums[i])),
              "element " + std::to_string(i) + " is not the sum in rank order");
    }
    expect_close(
        "round " + std::to_string(round), seen, own_.rows, s_.n, s_.n,
        [&](int64_t i, int64_t j) { return exact[i * s_.n + j]; },
        [&](int64_t i, int64_t j) { return allowed[i * s_.n + j]; });
    workspaces_.check_guards();
  }

  void check_untouched(int round) const {
    for (const T& one : c_[round]->read()) require(is_poison(one), "a sum without all its parts was written");
  }

 private:
  int64_t ldb() const { return s_.layout == PYRUNTIME_NT ? s_.k : s_.n; }

  // Operands of a rank.
  std::vector<T> a(int round, int of) const { return random_values<T>(s_.m * s_.k, 1000 * round + 2 * of); }
  std::vector<T> b(int round, int of) const {
    return random_values<T>(s_.n * s_.k, 1000 * round + 2 * of + 1);
  }

  PyruntimeWorkspace shape() const {
    const auto pieces = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
    const int64_t rows = cut(s_.m, rank_.world_size(), 0).rows;
    const int64_t flags = pieces(rows, PYRUNTIME_SIGNAL_ROWS) * pieces(s_.n, PYRUNTIME_SIGNAL_COLUMNS);
    return {rank_.world_size(), static_cast<int32_t>(flags), rank_.world_size() * rows * padded(s_.n) * 2};
  }

  PyruntimeMatmul request(const Buffer<T>& a, const Buffer<T>& b, T* c) const {
    return {dtype_of<T>(),
            s_.layout,
            s_.tiles,
            s_.m,
            s_.n,
            s_.k,
            a.data(),
            b.data(),
            nullptr,
            c,
            s_.k,
            ldb(),
            s_.n,
            rank_.most_blocks(),
            0};
  }

  Rank& rank_;
  Sizes s_;
  Cut own_;
  Workspaces workspaces_;
  std::vector<T> bias_;
  Buffer<T> on_bias_;
  std::vector<std::unique_ptr<Buffer<T>>> on_a_, on_b_, c_;
};

// Slots are used again from round PYRUNTIME_SLOTS on; in each round another rank is late.
template <class Op>
void rounds_of(Rank& rank, Op& op, int rounds, bool with_late_ranks) {
  for (int round = 0; round < rounds; ++round) {
    if (with_late_ranks && round % rank.world_size() == rank.rank()) nap_ms(100);
    const PyruntimeGroup group = op.begin(round);
    op.finish(group);
    expect_no_failure(rank, group);
  }
  rank.barrier();
  for (int round = 0; round < rounds; ++round) op.check(round);
}

template <class T>
void gather(Rank& rank, const Sizes& s, int pieces, int rounds, bool late) {
  Gather<T> op(rank, s, pieces, rounds);
  rounds_of(rank, op, rounds, late);
}

template <class T>
void scatter(Rank& rank, const Sizes& s, int rounds, bool late) {
  Scatter<T> op(rank, s, rounds);
  rounds_of(rank, op, rounds, late);
}

// The last rank does not come: the others are told, write nothing of it, and go on when all prepare anew.
void absent_in_gather(Rank& rank) {
  const int absent = rank.world_size() - 1;
  Gather<Bf16> op(rank, {PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 70, 40, 32}, 2, 2);
  if (rank.rank() != absent) {
    const PyruntimeFailure failure = expect_failure(rank, op.begin(0, kDeadline), absent);
    require(failure.op == PYRUNTIME_OP_ALL_GATHER_MATMUL, "the failure names another op");
    op.check_untouched(0, absent);
  }
  rank.barrier();
  op.workspaces().prepare();
  const PyruntimeGroup group = op.begin(1);
  op.finish(group);
  expect_no_failure(rank, group);
  op.check(1);
}

void absent_in_scatter(Rank& rank) {
  const int absent = rank.world_size() - 1;
  Scatter<Bf16> op(rank, {PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 70, 40, 32}, 2);
  if (rank.rank() != absent) {
    const PyruntimeFailure failure = expect_failure(rank, op.begin(0, kDeadline), absent);
    require(failure.op == PYRUNTIME_OP_MATMUL_REDUCE_SCATTER, "the failure names another op");
    op.check_untouched(0);
  }
  rank.barrier();
  op.workspaces().prepare();
  const PyruntimeGroup group = op.begin(1);
  op.finish(group);
  expect_no_failure(rank, group);
  op.check(1);
}

// Rank 1 has not finished with its slot, so rank 0 gets no leave to write there again.
void put_without_leave(Rank& rank) {
  Gather<Bf16> op(rank, {PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 8, 16, 16}, 1, 1);
  PyruntimeGroup group = op.begin(0);
  if (rank.rank() == 0) op.finish(group);
  expect_no_failure(rank, group);
  op.check(0);
  rank.barrier();
  if (rank.rank() == 0) {
    group.deadline_ns = kDeadline;
    op.put(group, 0);
    const PyruntimeFailure failure = expect_failure(rank, group, 1);
    require(failure.op == PYRUNTIME_OP_PUSH && failure.chunk == -1, "the failure is another one");
  }
}

// Everyone's bytes to everyone, as the chunked tier sends them: some flags for each chunk.
void exchange(Rank& rank, int64_t bytes, int rounds) {
  constexpr int kFlags = 3;
  const int world = rank.world_size(), me = rank.rank();
  const Workspaces workspaces(rank, {world, kFlags, world * bytes});
  const auto sent = [&](int round, int from) { return random_values<float>(bytes / 4, 100 * round + from); };
  std::vector<std::unique_ptr<Buffer<float>>> mine, out;
  for (int round = 0; round < rounds; ++round) {
    mine.push_back(std::make_unique<Buffer<float>>(sent(round, me)));
    out.push_back(std::make_unique<Buffer<float>>(world * bytes / 4));
  }
  for (int round = 0; round < rounds; ++round) {
    if (round % world == me) nap_ms(20);
    const PyruntimeGroup group = workspaces.group(round % PYRUNTIME_SLOTS);
    for (int step = 1; step < world; ++step) {
      ok(pyruntime_put(&group, mine[round]->data(), bytes, (me + step) % world, me * bytes, 0, kFlags,
                       rank.stream()));
    }
    ok(pyruntime_end_puts(&group, rank.stream()));
    for (int step = 1; step < world; ++step) {
      ok(pyruntime_await(&group, (me + step) % world, 0, kFlags, rank.stream()));
    }
    void* data = nullptr;
    ok(pyruntime_slot_data(&group, &data));
    expect_no_failure(rank, group);
    for (int from = 0; from < world; ++from) {
      if (from != me) {
        device::copy(out[round]->data() + from * bytes / 4, static_cast<unsigned char*>(data) + from * bytes,
                     bytes);
      }
    }
    ok(pyruntime_finish(&group, rank.stream()));
    expect_no_failure(rank, group);
  }
  for (int round = 0; round < rounds; ++round) {
    const std::vector<float> seen = out[round]->read();
    for (int from = 0; from < world; ++from) {
      const std::vector<float> wanted = sent(round, from);
      for (int64_t i = 0; i < bytes / 4; ++i) {
        const float one = seen[from * bytes / 4 + i];
        require(from == me ? is_poison(one) : same_bits(one, wanted[i]),
                "round " + std::to_string(round) + ": element " + std::to_string(i) + " of rank " +
                    std::to_string(from) + " is another");
      }
    }
  }
  workspaces.check_guards();
}

void refusals(Rank& rank) {
  const auto expect = [&](PyruntimeMatmul matmul, const std::string& words) {
    const PyruntimeWorkspace shape{1, 1, 1024};
    device::Handle unused;
    void* base = device::allocate_shared(pyruntime_workspace_bytes(&shape), unused);
    const PyruntimeGroup group{shape, 0, 0, kPatience, &base, 0, 0, nullptr};
    require(pyruntime_all_gather_matmul(&group, &matmul, rank.stream()) == PYRUNTIME_INVALID,
            "was not refused");
    const std::string said = pyruntime_error();
    require(said.find(words) != std::string::npos, "'" + said + "' does not say '" + words + "'");
  };
  const Buffer<Bf16> some(64);
  const PyruntimeMatmul fits{PYRUNTIME_BF16,
                             PYRUNTIME_NT,
                             PYRUNTIME_TILES_SMALL,
                             8,
                             8,
                             8,
                             some.data(),
                             some.data(),
                             nullptr,
                             some.data(),
                             8,
                             8,
                             8,
                             0,
                             0};
  PyruntimeMatmul other = fits;
  other.layout = 2;  // no kernel multiplies A transposed
  expect(other, "layout=2");
  other = fits;
  other.dtype = PYRUNTIME_FP32;
  expect(other, "dtype=2");
  other = fits;
  other.k = other.lda = other.ldb = 4096;
  expect(other, "make a larger workspace");
}

class List {
 public:
  explicit List(std::vector<Case>& cases) : cases_(cases) {}

  void alone(const std::string& name, const std::function<void(Rank&)>& body) {
    cases_.push_back({name, 1, Kind::kThreads, body});
  }

  void of(int ranks, const std::string& name, const std::function<void(Rank&)>& body) {
    const std::string label = name + ", " + std::to_string(ranks) + " ranks as ";
    cases_.push_back({label + "threads", ranks, Kind::kThreads, body});
    cases_.push_back({label + "processes", ranks, Kind::kProcesses, body});
  }

  template <class T>
  void gemm_of(const Sizes& s) {
    alone("gemm " + s.name(dtype_of<T>()), [s](Rank& rank) { gemm<T>(rank, s); });
  }

 private:
  std::vector<Case>& cases_;
};

}  // namespace

void add_gemm_cases(std::vector<Case>& cases) {
  List list(cases);
  for (const int layout : {PYRUNTIME_NT, PYRUNTIME_NN}) {
    for (const int tiles : {PYRUNTIME_TILES_SMALL, PYRUNTIME_TILES_LARGE}) {
      list.gemm_of<Bf16>({layout, tiles, 128, 256, 128});
      list.gemm_of<Fp16>({layout, tiles, 128, 128, 192, 0, 0, true});
      list.gemm_of<Bf16>({layout, tiles, 133, 261, 70, 8, 0, true});
      list.gemm_of<Fp16>({layout, tiles, 37, 141, 43, 3, 1, false});
    }
    list.gemm_of<Bf16>({layout, PYRUNTIME_TILES_SMALL, 1, 1, 1});
    list.gemm_of<Bf16>({layout, PYRUNTIME_TILES_SMALL, 16, 16, 0, 0, 0, true});
    if (!device::kEmulated) {  // enough for every compute unit, and for k to go round many times
      list.gemm_of<Bf16>({layout, PYRUNTIME_TILES_LARGE, 2048, 2176, 512});
      list.gemm_of<Fp16>({layout, PYRUNTIME_TILES_SMALL, 777, 1000, 4096, 0, 0, true});
    }
  }
  list.alone("what no kernel can do is refused", refusals);

  const auto small = PYRUNTIME_TILES_SMALL, large = PYRUNTIME_TILES_LARGE;
  const auto nt = PYRUNTIME_NT, nn = PYRUNTIME_NN;
  list.of(2, "gather NT bf16", [=](Rank& r) { gather<Bf16>(r, {nt, small, 190, 140, 72}, 2, 1, false); });
  list.of(3, "gather NN fp16", [=](Rank& r) { gather<Fp16>(r, {nn, large, 200, 70, 43}, 3, 1, false); });
  list.of(4, "gather, fewer rows than ranks",
          [=](Rank& r) { gather<Bf16>(r, {nt, small, 3, 17, 9}, 2, 1, false); });
  list.of(3, "gather, slots used again, late ranks",
          [=](Rank& r) { gather<Bf16>(r, {nt, small, 50, 24, 32}, 2, 9, true); });
  list.of(3, "gather around a ring, NT bf16",
          [=](Rank& r) { gather<Bf16>(r, {nt, small, 140, 70, 40, 0, 0, false, true}, 2, 1, false); });
  list.of(4, "gather around a ring, NN fp16, slots used again",
          [=](Rank& r) { gather<Fp16>(r, {nn, large, 43, 24, 32, 0, 0, false, true}, 2, 9, false); });
  list.of(2, "scatter NT bf16",
          [=](Rank& r) { scatter<Bf16>(r, {nt, small, 150, 140, 72, 0, 0, true}, 1, false); });
  list.of(3, "scatter NN fp16", [=](Rank& r) { scatter<Fp16>(r, {nn, large, 201, 77, 40}, 1, false); });
  list.of(4, "scatter, ragged", [=](Rank& r) { scatter<Bf16>(r, {nt, small, 77, 33, 19}, 1, false); });
  list.of(3, "scatter, slots used again, late ranks",
          [=](Rank& r) { scatter<Bf16>(r, {nt, small, 50, 24, 32}, 9, true); });
  list.of(2, "put, await, finish", [](Rank& r) { exchange(r, 40000, 9); });
  list.of(4, "put, await, finish", [](Rank& r) { exchange(r, device::kEmulated ? 1 << 15 : 1 << 22, 5); });
  list.of(3, "an absent rank in a gather", absent_in_gather);
  list.of(3, "an absent rank in a scatter", absent_in_scatter);
  list.of(2, "a put without leave", put_without_leave);
}

}  // namespace run
