// Launchers refuse what they cannot do, with a sentence, before they launch anything.
#include <functional>

#include "fused.h"

namespace {

using namespace kernels;

void expect_refused(int code, const std::string& words, int line) {
  EXPECT_EQ(code, PYRUNTIME_INVALID);
  const std::string said = pyruntime_error();
  if (said.find(words) == std::string::npos) {
    check::fail(__FILE__, line, "\"" + said + "\" does not say \"" + words + "\"");
  }
}

#define EXPECT_REFUSED(call, words) expect_refused(call, words, __LINE__)

struct Given {
  std::vector<Bf16> a = random_values<Bf16>(16 * 16, 1), c = poison<Bf16>(16 * 16);
  PyruntimeMatmul matmul{PYRUNTIME_BF16,
                         PYRUNTIME_NT,
                         PYRUNTIME_TILES_SMALL,
                         16,
                         16,
                         16,
                         a.data(),
                         a.data(),
                         nullptr,
                         c.data(),
                         16,
                         16,
                         16,
                         0,
                         0};
  ~Given() {
    EXPECT(std::all_of(c.begin(), c.end(), [](Bf16 x) { return x.bits == 0xffff; }));
  }
};

TEST(a_gemm_is_refused_for_every_wrong_argument) {
  using Change = std::function<void(PyruntimeMatmul&)>;
  const std::vector<std::pair<Change, std::string>> cases{
      {[](auto& m) { m.dtype = PYRUNTIME_FP32; }, "all_gather_matmul: dtype=2; use 0 (bf16) or 1 (fp16)."},
      {[](auto& m) { m.layout = 2; }, "layout=2; use 0 (NT) or 1 (NN)."},
      {[](auto& m) { m.tiles = -1; }, "tiles=-1; use 0 (small), 1 (large)"},
      {[](auto& m) { m.m = -1; }, "m=-1, n=16, k=16; sizes must not be negative"},
      {[](auto& m) { m.k = int64_t{1} << 31; }, "below 2^31"},
      {[](auto& m) { m.lda = 15; }, "lda=15, but a row has 16 elements."},
      {[](auto& m) { m.ldb = 15; }, "ldb=15, but a row has 16 elements."},
      {[](auto& m) { m.ldc = 15; }, "ldc=15, but a row has 16 elements."},
      {[](auto& m) { m.most_blocks = -2; }, "most_blocks=-2, spare_blocks=0; neither may be negative"},
      {[](auto& m) { m.a = nullptr; }, "a is a null pointer."},
      {[](auto& m) { m.b = nullptr; }, "b is a null pointer."},
      {[](auto& m) { m.c = nullptr; }, "c is a null pointer."},
  };
  const Workspaces workspaces({1, 1, 1 << 20});
  const PyruntimeGroup group = workspaces.group(0);
  for (const auto& [change, words] : cases) {
    Given given;
    change(given.matmul);
    EXPECT_REFUSED(pyruntime_all_gather_matmul(&group, &given.matmul, nullptr), words);
  }
  EXPECT_REFUSED(pyruntime_all_gather_matmul(&group, nullptr, nullptr), "the GEMM is a null pointer.");
}

TEST(a_group_is_refused_for_every_wrong_argument) {
  using Change = std::function<void(PyruntimeGroup&)>;
  const Workspaces workspaces(
      gather_shape({2, PYRUNTIME_NT, PYRUNTIME_TILES_SMALL, 16, 16, 16}, PYRUNTIME_BF16));
  static void* misplaced[2] = {reinterpret_cast<void*>(16), reinterpret_cast<void*>(8)};
  const std::vector<std::pair<Change, std::string>> cases{
      {[](auto& g) { g.shape.world_size = 0; }, "world_size=0; a group has 1 to 72 ranks."},
      {[](auto& g) { g.shape.world_size = 73; }, "world_size=73"},
      {[](auto& g) { g.rank = 2; }, "rank=2 in a group of 2 ranks."},
      {[](auto& g) { g.slot = 4; }, "slot=4; there are slots 0 to 3."},
      {[](auto& g) { g.pieces = 3; }, "pieces=3; this workspace has"},
      {[](auto& g) { g.deadline_ns = 0; }, "deadline_ns=0; every wait needs a deadline above 0 nanoseconds."},
      {[](auto& g) { g.workspaces = nullptr; }, "the list of workspaces is a null pointer."},
      {[](auto& g) { g.workspaces = misplaced; }, "the workspace of rank 1 lies at 0x8; it must be mapped"},
      {[](auto& g) { g.shape.slot_bytes = 100; }, "make a larger workspace."},
  };
  for (const auto& [change, words] : cases) {
    Given given;
    PyruntimeGroup group = workspaces.group(0);
    change(group);
    EXPECT_REFUSED(pyruntime_all_gather_matmul(&group, &given.matmul, nullptr), words);
    EXPECT_REFUSED(pyruntime_matmul_reduce_scatter(&group, &given.matmul, nullptr), words);
  }
}

TEST(rings_of_a_gather_are_refused_where_they_are_none) {
  const Workspaces workspaces({3, 4, 1 << 16});
  static const int32_t wrong[3] = {0, 1, 1};
  static const int32_t right[3] = {0, 2, 1};
  const auto refused = [&](int pieces, int rings, const int32_t* orders, const std::string& words) {
    Given given;
    PyruntimeGroup group = workspaces.group(0);
    group.pieces = pieces;
    group.rings = rings;
    group.ring_orders = orders;
    EXPECT_REFUSED(pyruntime_all_gather_matmul(&group, &given.matmul, nullptr), words);
  };
  refused(2, 1, wrong, "the ring 0-1-1 does not name each of 3 ranks once");
  refused(2, 1, nullptr, "rings=1 and pieces=2; around rings there go two pieces for each");
  refused(3, 1, right, "rings=1 and pieces=3");
  refused(2, -1, right, "rings=-1 and pieces=2");
}

TEST(puts_and_waits_are_refused_for_every_wrong_argument) {
  const Workspaces workspaces({2, 3, 64});
  const PyruntimeGroup group = workspaces.group(0);
  const char bytes[64] = {};
  EXPECT_REFUSED(pyruntime_put(&group, bytes, 8, 0, 0, 0, 1, nullptr), "peer=0 of rank 0 in a group of 2");
  EXPECT_REFUSED(pyruntime_put(&group, bytes, 8, 1, 60, 0, 1, nullptr), "bytes 60 to 68 of a slot of 64");
  EXPECT_REFUSED(pyruntime_put(&group, nullptr, 8, 1, 0, 0, 1, nullptr), "the chunk is a null pointer.");
  const PyruntimePut puts[2] = {{bytes, 8, 1, 0, 0, 1}, {bytes, 8, 0, 0, 0, 1}};
  EXPECT_REFUSED(pyruntime_put_together(&group, puts, 0, nullptr), "0 puts; make 1 to 72 at once.");
  EXPECT_REFUSED(pyruntime_put_together(&group, puts, 2, nullptr), "peer=0 of rank 0 in a group of 2");
  EXPECT_REFUSED(pyruntime_await(&group, 1, 2, 2, nullptr), "flags 2 to 4; this workspace has 3 a rank.");
  EXPECT_REFUSED(pyruntime_await_all(&group, 2, 2, nullptr), "flags 2 to 4; this workspace has 3 a rank.");
  EXPECT_REFUSED(pyruntime_slot_data(&group, nullptr), "there is nowhere to write the answer.");
  EXPECT_REFUSED(pyruntime_pass_on(&group, 0, 8, 1, 0, 0, 1, nullptr), "peer=0 of rank 0 in a group of 2");
  EXPECT_REFUSED(pyruntime_pass_on(&group, 1, 8, 1, 0, 0, 1, nullptr), "peer=1 is whose piece it is");
  EXPECT_REFUSED(pyruntime_pass_on(&group, 1, 8, 0, 0, 0, 1, nullptr), "peer=0 of rank 0 in a group of 2");
  const Workspaces three({3, 3, 64});
  const PyruntimeGroup one = three.group(0);
  EXPECT_REFUSED(pyruntime_pass_on(&one, 1, 8, 2, 60, 0, 1, nullptr), "bytes 60 to 68 of a slot of 64");
  EXPECT_REFUSED(pyruntime_pass_on(&one, 1, 8, 2, 0, 3, 1, nullptr), "flags 3 to 4; this workspace has 3");
  const PyruntimeWorkspace wrong{2, 0, 8};
  EXPECT_EQ(pyruntime_workspace_bytes(&wrong), -PYRUNTIME_INVALID);
}

TEST(support_kernels_check_their_arguments) {
  float x[8] = {};
  const void* parts[1] = {x};
  EXPECT_REFUSED(pyruntime_reduce(x, parts, 0, 8, PYRUNTIME_FP32, nullptr, 1, 0, nullptr),
                 "0 parts; there must be one at least.");
  EXPECT_REFUSED(pyruntime_reduce(x, parts, 1, 8, 7, nullptr, 1, 0, nullptr),
                 "dtype=7; use 0 (bf16), 1 (fp16) or 2 (fp32).");
  EXPECT_REFUSED(pyruntime_reduce(x, parts, 1, 8, PYRUNTIME_FP32, x, 0, 0, nullptr), "width=0");
  std::vector<float> values(400);
  std::vector<const void*> many;
  for (int p = 0; p < 80; ++p) many.push_back(&values[4 * p]);
  many[3] = many[60] = &values[399];
  EXPECT_REFUSED(pyruntime_reduce(x, parts, 1, 8, PYRUNTIME_FP32, nullptr, 1, -1, nullptr), "most_blocks=-1");
  EXPECT_REFUSED(pyruntime_reduce(x, many.data(), 80, 1, PYRUNTIME_FP32, nullptr, 1, 0, nullptr),
                 "80 parts, which may be 72 or must lie at equal distances, but for one.");
  PyruntimeAdamwOptions options{1e-3, 0.9, 0.99, 1e-8, 1};
  PyruntimeAdamwTensor tensor{x, x, nullptr, x, x, 8, 0.0, 0, 0};
  EXPECT_REFUSED(
      pyruntime_adamw(&tensor, 1, PYRUNTIME_BF16, PYRUNTIME_BF16, &options, nullptr, nullptr, nullptr),
      "tensor 0 has a null pointer among");
  tensor.grad = x;
  tensor.master = nullptr;
  const PyruntimeAdamwTensor unlike[2] = {tensor, {x, x, x, x, x, 8, 0.0, 0, 0}};
  EXPECT_REFUSED(
      pyruntime_adamw(unlike, 2, PYRUNTIME_BF16, PYRUNTIME_BF16, &options, nullptr, nullptr, nullptr),
      "tensor 1 has a master, unlike the first one.");
  EXPECT_REFUSED(
      pyruntime_adamw(&tensor, 1, PYRUNTIME_FP16, PYRUNTIME_BF16, &options, nullptr, nullptr, nullptr),
      "the tensors have no masters, and only bf16 is rounded at random.");
  const PyruntimeAdamwAhead earlier{tensor, x, x}, lacking{unlike[1], nullptr, nullptr};
  const PyruntimeAdamwAhead late{unlike[1], x, x};
  EXPECT_REFUSED(
      pyruntime_adamw_ahead(&earlier, 1, PYRUNTIME_BF16, PYRUNTIME_BF16, &options, &options, 1, nullptr),
      "tensor 0 has an earlier gradient and no master");
  EXPECT_REFUSED(
      pyruntime_adamw_ahead(&lacking, 1, PYRUNTIME_BF16, PYRUNTIME_BF16, &options, nullptr, 1, nullptr),
      "tensor 0 has no memory for its values ahead.");
  EXPECT_REFUSED(
      pyruntime_adamw_ahead(&late, 1, PYRUNTIME_BF16, PYRUNTIME_BF16, &options, nullptr, 1, nullptr),
      "there are no options of the step before.");
  options.beta2 = 1;
  EXPECT_REFUSED(
      pyruntime_adamw(nullptr, 0, PYRUNTIME_BF16, PYRUNTIME_BF16, &options, nullptr, nullptr, nullptr),
      "beta1=0.9, beta2=1; both must be in [0, 1).");
}

TEST(tiles_are_chosen_by_the_sizes) {
  EXPECT_EQ(pyruntime_choose_tiles(64, 512, 28672), static_cast<int>(PYRUNTIME_TILES_SMALL));  // half filled
  EXPECT_EQ(pyruntime_choose_tiles(2048, 16384, 28672), static_cast<int>(PYRUNTIME_TILES_LARGE));
  EXPECT_EQ(pyruntime_choose_tiles(128, 128, 256), static_cast<int>(PYRUNTIME_TILES_SMALL));  // one tile
}

}  // namespace
