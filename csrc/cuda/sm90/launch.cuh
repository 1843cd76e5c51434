// Launches an instance: tensor maps for TMA, and a grid of clusters that is resident as a whole.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/portable/checks.h"
#include "kernel.cuh"
#include "tensor_map.h"

namespace pyruntime::sm90 {

// Returns CuTe's stride of a matrix whose rows or columns are `pitch` apart.
template <class Stride>
Stride stride_of(int64_t pitch) {
  if constexpr (cute::is_constant<1, decltype(cute::get<0>(Stride{}))>::value) {
    return {cute::_1{}, pitch, 0};
  } else {
    return {pitch, cute::_1{}, 0};
  }
}

template <class Mainloop>
typename Mainloop::Params operands(const void* a, int64_t rows, int64_t lda, const PyruntimeMatmul& matmul) {
  using A = typename Mainloop::ElementA;
  using B = typename Mainloop::ElementB;
  const auto shape =
      cute::make_shape(static_cast<int>(rows), static_cast<int>(matmul.n), static_cast<int>(matmul.k));
  const typename Mainloop::Arguments arguments{
      static_cast<const A*>(a), stride_of<typename Mainloop::StrideA>(lda), static_cast<const B*>(matmul.b),
      stride_of<typename Mainloop::StrideB>(matmul.ldb)};
  return Mainloop::to_underlying_arguments(shape, arguments, nullptr);
}

// Maps the destination of each chunk's results.
template <class Gemm>
void map_results(Gemm& gemm, const Problem& problem) {
  using T = typename Gemm::Element;
  const PyruntimeMatmul& matmul = problem.matmul;
  for (int step = 0; step < problem.units.visits; ++step) {
    const portable::Visit& chunk = problem.units.visit[step];
    const bool scatters = problem.work == Work::kScatter;
    if (chunk.rows == 0 || (scatters && chunk.owner == problem.group.rank)) continue;
    T* to = scatters ? problem.group.data<T>(chunk.owner) + problem.group.rank * problem.part_elements
                     : static_cast<T*>(matmul.c) + chunk.begin * matmul.ldc;
    gemm.results[chunk.owner] =
        result_map(matmul.dtype, to, chunk.rows, matmul.n, scatters ? problem.part_pitch : matmul.ldc);
  }
}

// Returns the clusters of `kernel` that run at one time on its stream. The stream's context decides how much
// of the device it may use: a green context has some of the multiprocessors, MPS a percentage of them. The
// stream's id identifies the context, because a stream never changes its context and ids are never reused.
// Everything else is the same for each instance. The driver is asked once per stream, because its answer
// takes longer than a launch.
template <class Gemm>
int resident_clusters(void (*kernel)(Gemm), const cudaLaunchConfig_t& config) {
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, int> known;  // by device and stream
  int device = 0;
  unsigned long long stream = 0;
  cudaGetDevice(&device);
  if (cudaStreamGetId(config.stream, &stream) != cudaSuccess)
    portable::check_device("the search for a stream");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({device, stream});
  if (found != known.end()) return found->second;
  runtime::allow_shared_bytes(kernel, static_cast<int>(config.dynamicSmemBytes));
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1) {
    portable::check_device("the search for room");
    throw portable::DeviceError("no cluster of this kernel fits the device; use the portable kernel.");
  }
  return known[{device, stream}] = clusters;
}

// Returns the clusters of a grid that is resident as a whole, because its blocks wait for others; at least
// one.
template <class Config>
int clusters_of_grid(int resident, const Problem& problem) {
  int blocks = resident * Config::kCluster - problem.matmul.spare_blocks;
  if (problem.matmul.most_blocks > 0) blocks = std::min(blocks, problem.matmul.most_blocks);
  const int64_t units = std::max<int64_t>(1, problem.units.count());
  return static_cast<int>(std::min<int64_t>(clusters_of(blocks, Config::kCluster), units));
}

template <class Config, class T, int kLayout>
void launch(const Problem& problem, void* stream) {
  using Gemm = sm90::Gemm<Config, T, kLayout>;
  using Mainloop = typename Gemm::Types::Mainloop;
  const PyruntimeMatmul& matmul = problem.matmul;
  Gemm gemm{};
  // A rank without own rows still needs a valid map.
  const bool gathers = problem.work == Work::kGather;
  const int64_t pitch = portable::padded_width(matmul.k);
  const void* gathered = gathers ? problem.group.data<T>(problem.group.rank) : nullptr;
  if (gathers) gemm.others = operands<Mainloop>(gathered, matmul.m, pitch, matmul);
  gemm.own = problem.rows_of_a > 0 ? operands<Mainloop>(matmul.a, problem.rows_of_a, matmul.lda, matmul)
                                   : gemm.others;
  map_results(gemm, problem);
  gemm.work = problem.work;
  gemm.m = static_cast<int>(matmul.m);
  gemm.n = static_cast<int>(matmul.n);
  gemm.k = static_cast<int>(matmul.k);
  gemm.units = problem.units;
  gemm.group = problem.group;
  gemm.bias = static_cast<const T*>(matmul.bias);
  gemm.c = static_cast<T*>(matmul.c);
  gemm.ldc = matmul.ldc;
  gemm.part_elements = problem.part_elements;
  gemm.part_pitch = problem.part_pitch;

  const auto kernel = multiply<Gemm>;
  constexpr int kSharedBytes = sizeof(SharedMemory<Gemm>);
  static_assert(kSharedBytes <= 227 * 1024, "the most that a block may have");
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(Config::kCluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<runtime::Stream>(stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  config.gridDim = Config::kCluster;
  const int clusters = clusters_of_grid<Config>(resident_clusters(kernel, config), problem);
  config.gridDim = static_cast<unsigned>(clusters * Config::kCluster);
  cudaLaunchKernelEx(&config, kernel, gemm);
}

}  // namespace pyruntime::sm90
