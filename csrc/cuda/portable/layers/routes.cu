// The order of the rows that a router has sent to experts, and sums of what became of a row.
//
// A block has kPlaces places of the table, and a thread a group, for which it goes through them in order: so
// groups are in order without atomics. First it counts; then offsets of blocks are summed, one block for each
// group; then it writes.
#include "cuda/portable/checks.h"
#include "rows.cuh"

using namespace pyruntime;
using namespace pyruntime::portable;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / device::kWarpSize;
constexpr int kPlaces = 512;
constexpr int kBlocksPerMultiprocessor = 4;

struct Operands {
  PyruntimeRoutes routes;
  int blocks;
};

PYRUNTIME_DEVICE int group_at(const PyruntimeRoutes& routes, const float* row, int slot) {
  const int expert = static_cast<int>(row[slot]) - routes.first;
  return expert < 0 || expert >= routes.per * routes.groups ? -1 : expert / routes.per;
}

// The group of a place; -1: none, or another slot of its row comes first.
PYRUNTIME_DEVICE int group_of(const PyruntimeRoutes& routes, int place) {
  const int row_of = place / routes.slots, slot = place % routes.slots;
  const float* row = routes.table + static_cast<int64_t>(row_of) * 2 * routes.slots;
  const int group = group_at(routes, row, slot);
  for (int other = 0; routes.per > 1 && other < slot; ++other) {
    if (group_at(routes, row, other) == group) return -1;
  }
  return group;
}

// The first place of this block; all places are below 2^31.
PYRUNTIME_DEVICE int first_place() {
  return static_cast<int>(blockIdx.x) * kPlaces;
}

// The groups of this block's places, in shared memory, and how many they are.
PYRUNTIME_DEVICE int load_groups(const PyruntimeRoutes& routes, int* groups) {
  const int first = first_place(), left = static_cast<int>(routes.rows) * routes.slots - first;
  const int count = left < kPlaces ? left : kPlaces;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
    groups[i] = group_of(routes, first + i);
  __syncthreads();
  return count;
}

// scratch [groups][blocks] = the places of each group among those of each block.
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
count_places(PYRUNTIME_PARAMETER Operands parameter) {
  PYRUNTIME_SHARED(shared);
  int* const groups = reinterpret_cast<int*>(shared);
  const Operands& o = device::first_parameter(parameter);
  const int count = load_groups(o.routes, groups);
  for (int group = static_cast<int>(threadIdx.x); group < o.routes.groups; group += kThreads) {
    int found = 0;
    for (int i = 0; i < count; ++i) found += groups[i] == group ? 1 : 0;
    o.routes.scratch[static_cast<int64_t>(group) * o.blocks + blockIdx.x] = found;
  }
}

// For the group of this block: scratch [blocks] = those of all blocks before; counts = all.
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
sum_counts(PYRUNTIME_PARAMETER Operands parameter) {
  PYRUNTIME_SHARED(shared);
  int* const sums = reinterpret_cast<int*>(shared);
  const Operands& o = device::first_parameter(parameter);
  const int thread = static_cast<int>(threadIdx.x), each = (o.blocks + kThreads - 1) / kThreads;
  int* const counts = o.routes.scratch + static_cast<int64_t>(blockIdx.x) * o.blocks;
  const int begin = thread * each, end = begin + each < o.blocks ? begin + each : o.blocks;
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += counts[i];
  sums[thread] = sum;
  __syncthreads();
  int before = 0;
  for (int other = 0; other < thread; ++other) before += sums[other];
  if (thread == kThreads - 1) o.routes.counts[blockIdx.x] = before + sum;
  for (int i = begin; i < end; ++i) {
    const int own = counts[i];
    counts[i] = before;
    before += own;
  }
}

PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
write_places(PYRUNTIME_PARAMETER Operands parameter) {
  PYRUNTIME_SHARED(shared);
  int* const groups = reinterpret_cast<int*>(shared);
  const Operands& o = device::first_parameter(parameter);
  const PyruntimeRoutes& routes = o.routes;
  const int count = load_groups(routes, groups);
  const int first = first_place();
  for (int i = static_cast<int>(threadIdx.x); routes.positions != nullptr && i < count; i += kThreads) {
    if (groups[i] < 0) routes.positions[first + i] = -1;
  }
  for (int group = static_cast<int>(threadIdx.x); group < routes.groups; group += kThreads) {
    int at = routes.scratch[static_cast<int64_t>(group) * o.blocks + blockIdx.x];
    for (int before = 0; before < group; ++before) at += static_cast<int>(routes.counts[before]);
    for (int i = 0; i < count; ++i) {
      if (groups[i] != group) continue;
      const int place = first + i, row = place / routes.slots;
      routes.rows_of[at] = row;
      if (routes.places != nullptr) routes.places[at] = place;
      if (routes.weights != nullptr) {
        const int64_t in_table = static_cast<int64_t>(row) * routes.slots;
        routes.weights[at] = routes.table[in_table + routes.slots + place];
      }
      if (routes.positions != nullptr) routes.positions[place] = at;
      ++at;
    }
  }
}

void launch(const PyruntimeRoutes& routes, void* stream) {
  const int blocks = static_cast<int>((routes.rows * routes.slots + kPlaces - 1) / kPlaces);
  const Operands o{routes, blocks};
  constexpr int kShared = kPlaces * sizeof(int), kSums = kThreads * sizeof(int);
  if (blocks > 0) PYRUNTIME_LAUNCH(count_places, blocks, kThreads, kShared, stream, o);
  PYRUNTIME_LAUNCH(sum_counts, routes.groups, kThreads, kSums, stream, o);
  if (blocks > 0) PYRUNTIME_LAUNCH(write_places, blocks, kThreads, kShared, stream, o);
}

// ---- sums ----

template <class T>
struct Places {
  const int32_t* positions;
  const T* values;
  T* y;
  int64_t rows;
  int columns, slots;
  int packs;  // of a row; 0 if elements are processed one by one
};

// The least of a row's positions that is above `last`; -1: none is.
PYRUNTIME_DEVICE int next_position(const int32_t* positions, int slots, int last) {
  int next = -1;
  for (int slot = 0; slot < slots; ++slot) {
    const int position = positions[slot];
    if (position > last && (next < 0 || position < next)) next = position;
  }
  return next;
}

template <int kCount, class T>
PYRUNTIME_DEVICE void sum_at(const Places<T>& o, int64_t row, int column) {
  const int32_t* positions = o.positions + row * o.slots;
  float sums[kCount] = {}, values[kCount];
  for (int at = next_position(positions, o.slots, -1); at >= 0; at = next_position(positions, o.slots, at)) {
    load_floats<kCount>(o.values + static_cast<int64_t>(at) * o.columns + column, values);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums[e] += values[e];
  }
  store_floats<kCount>(o.y + row * o.columns + column, sums);
}

// A warp has a row.
template <class T>
PYRUNTIME_KERNEL(kThreads, kBlocksPerMultiprocessor)
sum_places(PYRUNTIME_PARAMETER Places<T> parameter) {
  constexpr int kCount = Vector<T>::kCount, kLanes = device::kWarpSize;
  const Places<T>& o = device::first_parameter(parameter);
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < o.rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps) {
    for (int pack = lane; pack < o.packs; pack += kLanes) sum_at<kCount>(o, row, pack * kCount);
    for (int column = o.packs * kCount + lane; column < o.columns; column += kLanes)
      sum_at<1>(o, row, column);
  }
}

template <class T>
void launch(const PyruntimePlaceSums& sums, void* stream) {
  Places<T> o{sums.positions,
              static_cast<const T*>(sums.values),
              static_cast<T*>(sums.y),
              sums.rows,
              static_cast<int>(sums.columns),
              sums.slots,
              0};
  if (rows_are_aligned<T>(o.values, o.columns) && is_aligned(o.y)) o.packs = o.columns / Vector<T>::kCount;
  const int blocks = blocks_for((o.rows + kWarps - 1) / kWarps, 0, kBlocksPerMultiprocessor);
  PYRUNTIME_LAUNCH(sum_places<T>, blocks, kThreads, 0, stream, o);
}

}  // namespace

int pyruntime_sort_routes(const PyruntimeRoutes* routes, void* stream) {
  return guarded("sort_routes", [&] {
    require(routes != nullptr, "the operands are a null pointer.");
    const PyruntimeRoutes& r = *routes;
    require(r.rows >= 0 && r.slots >= 1 && r.rows <= INT32_MAX / r.slots, "rows=", r.rows,
            ", slots=", r.slots, "; a row has one slot at least, and all together are below 2^31.");
    require(r.first >= 0 && r.per >= 1 && r.groups >= 1 && r.per <= INT32_MAX / r.groups, "first=", r.first,
            ", per=", r.per, ", groups=", r.groups,
            "; there must be a group and an expert in each, and first may not be negative.");
    require(r.counts != nullptr, "counts is a null pointer.");
    require(r.rows == 0 || (r.table != nullptr && r.scratch != nullptr && r.rows_of != nullptr),
            "one of table, scratch and rows_of is a null pointer.");
    launch(r, stream);
  });
}

int64_t pyruntime_sort_routes_scratch(int64_t rows, int32_t slots, int32_t groups) {
  return (rows * slots + kPlaces - 1) / kPlaces * groups;
}

int pyruntime_sum_places(const PyruntimePlaceSums* sums, void* stream) {
  return guarded("sum_places", [&] {
    require(sums != nullptr, "the operands are a null pointer.");
    check_dtype(sums->dtype, /*with_fp32=*/true);
    require(sums->rows >= 0 && sums->slots >= 1 && sums->columns >= 0 && sums->held >= 0, "rows=", sums->rows,
            ", slots=", sums->slots, ", columns=", sums->columns, ", held=", sums->held,
            "; none may be negative, and a row has one slot at least.");
    require(sums->columns < int64_t{1} << 30, "columns=", sums->columns, "; use less than 2^30.");
    if (sums->rows == 0 || sums->columns == 0) return;
    require(sums->positions != nullptr && sums->y != nullptr, "one of positions and y is a null pointer.");
    require(sums->held == 0 || sums->values != nullptr, "values is a null pointer.");
    with_element(sums->dtype, [&](auto element) { launch<decltype(element)>(*sums, stream); });
  });
}
