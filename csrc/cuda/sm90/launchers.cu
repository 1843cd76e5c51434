#include "choose_tiles.h"
#include "cuda/portable/checks.h"
#include "cuda/portable/gemm/all_gather_matmul.cuh"
#include "cuda/portable/gemm/matmul_reduce_scatter.cuh"
#include "launchers.h"
#include "problem.h"

using namespace pyruntime;
using namespace pyruntime::sm90;
using namespace pyruntime::portable;

namespace {

#if defined(PYRUNTIME_WITH_SM90)
constexpr bool kBuilt = true;
#else
constexpr bool kBuilt = false;
#endif

// A valid call that is left to the portable kernel.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void refuse_unless(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw Refusal(sentence.str());
}

void check_address(const char* name, const void* start, int64_t pitch) {
  refuse_unless(is_aligned(start), name, " lies at ", start,
                "; TMA reads and writes from multiples of 16 bytes on.");
  refuse_unless(pitch % 8 == 0, "ld", name, "=", pitch,
                "; TMA needs rows that lie multiples of 8 elements apart.");
  refuse_unless(pitch < int64_t{1} << 38, "ld", name, "=", pitch,
                "; TMA takes rows less than 2^38 elements apart.");
}

void check_that_device_is_hopper() {
  const int major = runtime::attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = runtime::attribute(cudaDevAttrComputeCapabilityMinor);
  if (major == 9 && minor == 0) return;
  const char* error = runtime::last_error();
  refuse_unless(error == nullptr, "there is no device: ", error, ".");
  refuse_unless(false, "the device has compute capability ", major, ".", minor,
                "; these kernels are for 9.0.");
}

void check_that_they_are_built() {
  refuse_unless(kBuilt, "this library was built without kernels for compute capability 9.0.");
}

// Asks the device last, so that all other reasons are given even without one.
void check_that_it_is_for_hopper(const PyruntimeMatmul& matmul, int64_t rows_of_a, bool writes_c_by_tma) {
  check_that_they_are_built();
  const bool is_empty = matmul.m == 0 || matmul.n == 0 || matmul.k == 0;
  refuse_unless(!is_empty, "the GEMM is empty; TMA has no maps of nothing.");
  if (rows_of_a > 0) check_address("a", matmul.a, matmul.lda);
  check_address("b", matmul.b, matmul.ldb);
  if (writes_c_by_tma) check_address("c", matmul.c, matmul.ldc);
  check_that_device_is_hopper();
}

// Runs a launcher whose body may refuse. Invalid arguments still get their own code, from guarded().
template <class Body>
int offered(const char* op, const Body& body) {
  std::string why;
  const int code = guarded(op, [&] {
    try {
      body();
    } catch (const Refusal& refusal) {
      why = refusal.what();
      throw;
    }
  });
  if (why.empty()) return code;
  return remember_error(PYRUNTIME_REFUSED, std::string(op) + " is left to the portable kernel: " + why);
}

template <class Config, class T>
void launch_layout(const Problem& problem, void* stream) {
#if defined(PYRUNTIME_WITH_SM90)
  if (problem.matmul.layout == PYRUNTIME_NT) return launch<Config, T, PYRUNTIME_NT>(problem, stream);
  launch<Config, T, PYRUNTIME_NN>(problem, stream);
#else
  (void)problem, (void)stream;
#endif
}

// order: the chunks in the order of their visits.
void launch_tiles(Problem& problem, const std::vector<Chunk>& order, void* stream) {
  const auto with = [&](auto config) {
    using Config = decltype(config);
    problem.units = make_units<Config>(order, problem.matmul.n);
    with_half(problem.matmul.dtype,
              [&](auto element) { launch_layout<Config, decltype(element)>(problem, stream); });
  };
  if (problem.matmul.tiles == PYRUNTIME_TILES_LARGE) return with(sm90::LargeTiles{});
  with(sm90::SmallTiles{});
}

}  // namespace

int pyruntime_sm90_choose_tiles(int64_t chunk_rows, int64_t m, int64_t n, int64_t k, int32_t blocks) {
  return choose_tiles(chunk_rows, m, n, k, blocks > 0 ? blocks : runtime::multiprocessors() - 1);
}

int pyruntime_sm90_is_on_device() {
  return offered("a search for a device", [] {
    check_that_they_are_built();
    check_that_device_is_hopper();
  });
}

int pyruntime_sm90_all_gather_matmul(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                     void* stream) {
  return offered("all_gather_matmul", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_ALL_GATHER_MATMUL);
    check_gather(view, matmul);
    require(matmul->m == 0 || matmul->n == 0 || matmul->c != nullptr, "c is a null pointer.");
    const ChunkPlan plan(matmul->m, view.world_size(), view.rank);
    check_that_it_is_for_hopper(*matmul, plan.own().rows, /*writes_c_by_tma=*/true);
    Problem problem{};
    problem.work = Work::kGather;
    problem.group = view;
    problem.matmul = *matmul;
    problem.rows_of_a = plan.own().rows;
    // Leaves room for the waits and signals of this rank's own puts, as the portable kernel does.
    if (view.world_size() > 1 && matmul->spare_blocks == 0) problem.matmul.spare_blocks = 1;
    launch_tiles(problem, plan.gather_order(), stream);
  });
}

int pyruntime_sm90_matmul_reduce_scatter(const PyruntimeGroup* group, const PyruntimeMatmul* matmul,
                                         void* stream) {
  return offered("matmul_reduce_scatter", [&] {
    const Group view = checked_group(group, PYRUNTIME_OP_MATMUL_REDUCE_SCATTER);
    check_matmul(matmul);
    check_scatter(view, *matmul);
    check_that_it_is_for_hopper(*matmul, matmul->m, /*writes_c_by_tma=*/false);
    Problem problem{};
    problem.work = Work::kScatter;
    problem.group = view;
    problem.matmul = *matmul;
    problem.rows_of_a = matmul->m;
    problem.part_elements = part_elements(matmul->m, matmul->n, view.world_size());
    problem.part_pitch = part_pitch(matmul->n);
    launch_tiles(problem, ChunkPlan(matmul->m, view.world_size(), view.rank).scatter_order(), stream);
  });
}
