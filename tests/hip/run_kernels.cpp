// Runs the library's kernels on this machine's GPUs of AMD and compares every result with fp64:
//
//     python3 tools/build_hip.py
//     HIP_PLATFORM=amd hipcc -std=c++17 -Icsrc tests/hip/*.cpp -Lpyruntime -lpyruntime_hip -o run_kernels
//     LD_LIBRARY_PATH=pyruntime ./run_kernels
//
// or `make test-hip-run`. Nothing but the library and amdhip64 is linked. A line for each case; exit code 0
// where all went well, 1 where one did not, 2 where HIP finds no device, with the reason. Words as arguments
// choose the cases whose names contain all of them. Every case is a process of its own, so one that ends by a
// fault of memory is one line; every output lies between guard bytes, and so does every workspace.
//
// Ranks are threads of one process, or processes that open each other's memory through hipIpc*. They share
// the GPU where there are fewer GPUs than ranks: each then launches its share of the blocks, because
// the blocks of all must run at one time.
#include <chrono>
#include <cstdio>
#include <random>

#include "gemm_cases.h"
#include "layer_cases.h"

namespace run {

uint64_t seed = std::random_device{}();

namespace {

bool chosen(const std::string& name, int count, char** words) {
  for (int i = 1; i < count; ++i) {
    if (name.find(words[i]) == std::string::npos) return false;
  }
  return true;
}

int main(int count, char** words) {
  device::prepare_process();
  // This process never calls HIP: what it forks could not call it then.
  const std::string none = in_process(device::why_none, 60);
  if (!none.empty()) {
    std::printf("no device: %s\n", none.c_str());
    return 2;
  }
  std::printf("%s, seed %llu\n", in_process(device::name, 60).c_str(), static_cast<unsigned long long>(seed));
  std::vector<Case> cases;
  add_gemm_cases(cases);
  add_layer_cases(cases);
  add_route_cases(cases);
  int ran = 0, failed = 0;
  for (const Case& one : cases) {
    if (!chosen(one.name, count, words)) continue;
    const auto start = std::chrono::steady_clock::now();
    const std::string wrong = outcome(one);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%-6s  %6.2f s  %s%s%s\n", wrong.empty() ? "ok" : "FAILED", seconds, one.name.c_str(),
                wrong.empty() ? "" : ": ", wrong.c_str());
    ++ran;
    failed += wrong.empty() ? 0 : 1;
  }
  std::printf("%d cases, %d failed\n", ran, failed);
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace
}  // namespace run

int main(int count, char** words) {
  return run::main(count, words);
}
