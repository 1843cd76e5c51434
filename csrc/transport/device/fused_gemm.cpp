#include "transport/device/fused_gemm.h"

#include <algorithm>
#include <array>
#include <functional>

#include "core/chunk_plan.h"

namespace pyruntime {

namespace {

// The distance from row to row; a matrix of one row has any.
int64_t pitch(const at::Tensor& matrix) {
  return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1);
}

// The kernels take matrices with contiguous rows: all but transposed views.
at::Tensor with_contiguous_rows(const at::Tensor& matrix) {
  const bool rows_are_whole = matrix.size(1) <= 1 || matrix.stride(1) == 1;
  return rows_are_whole && pitch(matrix) >= matrix.size(1) ? matrix : matrix.contiguous();
}

const void* address(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? tensor.const_data_ptr() : nullptr;
}

struct TileChoice {
  const char* name;
  bool hopper;
  int32_t tiles;
};

constexpr std::array<TileChoice, 4> kTiles{{{"small", false, PYRUNTIME_TILES_SMALL},
                                            {"large", false, PYRUNTIME_TILES_LARGE},
                                            {"sm90-small", true, PYRUNTIME_TILES_SMALL},
                                            {"sm90-large", true, PYRUNTIME_TILES_LARGE}}};

// The tiles of that name; nullptr if `name` is empty.
const TileChoice* tiles_named(const std::string& name) {
  for (const TileChoice& choice : kTiles) {
    if (name == choice.name) return &choice;
  }
  TORCH_CHECK_VALUE(name.empty(), "There are no tiles '", name,
                    "'; use small, large, sm90-small or sm90-large.");
  return nullptr;
}

bool is_on_hopper(const DeviceLibrary& library) {
  return library.sm90_choose_tiles != nullptr && library.sm90_is_on_device() == PYRUNTIME_OK;
}

// The portable rule chooses large tiles for so large a GEMM wherever a block has the shared memory for them.
bool has_large_tiles(const DeviceLibrary& library) {
  constexpr int64_t kMany = int64_t{1} << 20;
  return library.choose_tiles(kMany, kMany, kMany) == PYRUNTIME_TILES_LARGE;
}

// The quickest tiles of a GEMM by rule; the only place where they are chosen. `blocks`: how many run at once.
int32_t choose_tiles(const DeviceLibrary& library, bool hopper, int64_t m, int64_t n, int64_t k,
                     int world_size, int blocks) {
  const int64_t chunk_rows = rows_of_rank(m, world_size, 0);
  return hopper ? library.sm90_choose_tiles(chunk_rows, m, n, k, blocks)
                : library.choose_tiles(chunk_rows, m, n);
}

// At least as many blocks as any tiles of any kernel make: a cluster may have two for one signal.
int most_blocks(int world_size, int64_t rows, int64_t n) {
  constexpr int64_t kNoLimit = 1 << 20;
  const auto pieces = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  const int64_t down = world_size * pieces(rows_of_rank(rows, world_size, 0), PYRUNTIME_SIGNAL_ROWS);
  return static_cast<int>(std::min(kNoLimit, 2 * down * pieces(n, PYRUNTIME_SIGNAL_COLUMNS)));
}

BlockBudget::Launch launch_at(const DeviceLibrary& library, int world_size, int64_t rows, int64_t n,
                              const FusedPlace& place) {
  return {place.stream, library.multiprocessors(), most_blocks(world_size, rows, n), place.is_captured,
          place.owner};
}

// Calls `launch(matmul, hopper)` with the GEMM as the launchers take it: for Hopper, and if that kernel
// refuses, the portable one. `blocks`: as many as may run; `all`: as many as there could be.
void launch_one_of_two(const DeviceLibrary& library, int world_size, int64_t rows, const FusedGemm& gemm,
                       int blocks, int all,
                       const std::function<int(const PyruntimeMatmul&, bool hopper)>& launch) {
  const at::Tensor a = with_contiguous_rows(gemm.a), b = with_contiguous_rows(gemm.weight);
  const at::Tensor bias = gemm.bias.defined() ? gemm.bias.contiguous() : gemm.bias;
  PyruntimeMatmul matmul{};
  matmul.dtype = a.scalar_type() == c10::ScalarType::BFloat16 ? PYRUNTIME_BF16 : PYRUNTIME_FP16;
  matmul.layout = gemm.transposed ? PYRUNTIME_NT : PYRUNTIME_NN;
  matmul.m = rows;
  matmul.n = gemm.out.size(1);
  matmul.k = a.size(1);
  matmul.a = address(a);
  matmul.b = address(b);
  matmul.bias = address(bias);
  matmul.c = gemm.out.numel() > 0 ? gemm.out.data_ptr() : nullptr;
  matmul.lda = pitch(a);
  matmul.ldb = pitch(b);
  matmul.ldc = pitch(gemm.out);
  matmul.spare_blocks = BlockBudget::kSpare;
  // A multiprocessor has room for several blocks of a portable kernel, unless others may need one whole.
  matmul.most_blocks = blocks < all ? blocks : 0;
  const TileChoice* named = tiles_named(gemm.tiles);
  const auto tiles = [&](bool hopper) {
    const bool is_named = named != nullptr && named->hopper == hopper;
    return is_named ? named->tiles
                    : choose_tiles(library, hopper, matmul.m, matmul.n, matmul.k, world_size, blocks);
  };
  if (library.sm90_choose_tiles != nullptr && (named == nullptr || named->hopper)) {
    matmul.tiles = tiles(/*hopper=*/true);
    const int code = launch(matmul, /*hopper=*/true);
    if (code != PYRUNTIME_REFUSED) return library.check(code);
  }
  matmul.tiles = tiles(/*hopper=*/false);
  library.check(launch(matmul, /*hopper=*/false));
}

}  // namespace

std::vector<std::string> tile_names(const DeviceLibrary& library) {
  std::vector<std::string> names;
  for (const TileChoice& choice : kTiles) {
    if (choice.hopper && !is_on_hopper(library)) continue;
    if (!choice.hopper && choice.tiles == PYRUNTIME_TILES_LARGE && !has_large_tiles(library)) continue;
    names.emplace_back(choice.name);
  }
  return names;
}

std::vector<std::string> other_tile_names(const DeviceLibrary& library, int world_size, int64_t rows,
                                          int64_t n, int64_t k) {
  // TMA requires rows that lie multiples of 16 bytes apart.
  const bool hopper = is_on_hopper(library) && rows > 0 && n > 0 && k > 0 && n % 8 == 0 && k % 8 == 0;
  const int32_t usual = choose_tiles(library, hopper, rows, n, k, world_size, /*blocks=*/0);
  std::vector<std::string> names;
  for (const std::string& name : tile_names(library)) {
    const TileChoice& choice = *tiles_named(name);
    const bool is_usual = choice.hopper == hopper && choice.tiles == usual;
    if (!is_usual && (hopper || !choice.hopper)) names.push_back(name);
  }
  return names;
}

std::string why_crowded(const DeviceLibrary& library, int world_size, int64_t rows, int64_t n,
                        const FusedPlace& place) {
  return place.budget.why_crowded(launch_at(library, world_size, rows, n, place));
}

void multiply_fused(const DeviceLibrary& library, const PyruntimeGroup& group, int64_t rows,
                    const FusedGemm& gemm, const FusedPlace& place, FusedKernel portable,
                    FusedKernel hopper) {
  const int world_size = group.shape.world_size;
  const BlockBudget::Launch wanted = launch_at(library, world_size, rows, gemm.out.size(1), place);
  const int all = std::min(wanted.blocks, wanted.multiprocessors - BlockBudget::kSpare);
  const auto launch = [&](const PyruntimeMatmul& matmul, bool on_hopper) {
    return (on_hopper ? hopper : portable)(&group, &matmul, place.handle);
  };
  place.budget.put(
      wanted, [&](int blocks) { launch_one_of_two(library, world_size, rows, gemm, blocks, all, launch); });
}

}  // namespace pyruntime
