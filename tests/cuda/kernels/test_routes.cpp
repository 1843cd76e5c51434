// The order of routed rows and sums of what became of a row, against plain loops.
#include <algorithm>
#include <limits>

#include "ranks.h"

namespace {

using namespace pyruntime;
using namespace kernels;

// A table whose rows have different experts below `experts`, and here and there none.
std::vector<float> routes_table(int64_t rows, int slots, int experts, uint64_t seed) {
  std::vector<float> table(rows * 2 * slots);
  std::vector<int> all(experts);
  uint64_t state = seed;
  const auto draw = [&](uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
  };
  for (int64_t row = 0; row < rows; ++row) {
    for (int expert = 0; expert < experts; ++expert) all[expert] = expert;
    for (int slot = 0; slot < slots; ++slot) {
      std::swap(all[slot], all[slot + draw(experts - slot)]);
      const bool is_none = draw(11) == 0;
      table[(row * 2) * slots + slot] = static_cast<float>(is_none ? -1 : all[slot]);
      table[(row * 2 + 1) * slots + slot] = static_cast<float>(draw(1000)) / 1000;
    }
  }
  return table;
}

struct Found {
  std::vector<int64_t> counts, rows_of, places;
  std::vector<float> weights;
  std::vector<int32_t> positions;
};

Found expected(const std::vector<float>& table, int64_t rows, int slots, int first, int per, int groups) {
  Found found;
  found.positions.assign(rows * slots, -1);
  for (int group = 0; group < groups; ++group) {
    const auto begin = static_cast<int64_t>(found.rows_of.size());
    for (int64_t row = 0; row < rows; ++row) {
      for (int slot = 0; slot < slots; ++slot) {
        const int expert = static_cast<int>(table[2 * row * slots + slot]);
        if (expert < first + group * per || expert >= first + (group + 1) * per) continue;
        if (per > 1 && begin < static_cast<int64_t>(found.rows_of.size()) && found.rows_of.back() == row)
          continue;
        found.positions[row * slots + slot] = static_cast<int32_t>(found.rows_of.size());
        found.rows_of.push_back(row);
        found.places.push_back(row * slots + slot);
        found.weights.push_back(table[(2 * row + 1) * slots + slot]);
      }
    }
    found.counts.push_back(static_cast<int64_t>(found.rows_of.size()) - begin);
  }
  return found;
}

PyruntimeRoutes routes_of(const std::vector<float>& table, int64_t rows, int slots, int first, int per,
                          int groups) {
  PyruntimeRoutes routes{};
  routes.rows = rows;
  routes.slots = slots;
  routes.first = first;
  routes.per = per;
  routes.groups = groups;
  routes.table = table.data();
  return routes;
}

void sorts(int64_t rows, int slots, int experts, int first, int per, int groups) {
  const std::vector<float> table = routes_table(rows, slots, experts, rows + 7);
  const Found wanted = expected(table, rows, slots, first, per, groups);
  const size_t places = rows * slots, size = wanted.rows_of.size();
  std::vector<int32_t> scratch(pyruntime_sort_routes_scratch(rows, slots, groups));
  Found found{std::vector<int64_t>(groups), std::vector<int64_t>(places, -7),
              std::vector<int64_t>(places, -7), std::vector<float>(places, -7),
              std::vector<int32_t>(places, -7)};
  PyruntimeRoutes routes = routes_of(table, rows, slots, first, per, groups);
  routes.counts = found.counts.data();
  routes.scratch = scratch.data();
  routes.rows_of = found.rows_of.data();
  std::vector<int64_t> alone(places, -7);
  for (const bool with_all : {true, false}) {
    if (with_all) {
      routes.places = found.places.data();
      routes.weights = found.weights.data();
      routes.positions = found.positions.data();
    } else {
      routes.rows_of = alone.data();
      routes.places = nullptr;
      routes.weights = nullptr;
      routes.positions = nullptr;
    }
    EXPECT_OK(pyruntime_sort_routes(&routes, nullptr));
  }
  EXPECT(found.counts == wanted.counts);
  EXPECT(found.positions == wanted.positions);
  EXPECT(found.rows_of == alone);
  for (size_t i = size; i < places; ++i)
    EXPECT(found.rows_of[i] == -7 && found.places[i] == -7 && found.weights[i] == -7);
  found.rows_of.resize(size);
  found.places.resize(size);
  found.weights.resize(size);
  EXPECT(found.rows_of == wanted.rows_of);
  EXPECT(found.places == wanted.places);
  EXPECT(found.weights == wanted.weights);
}

TEST(places_are_sorted_by_expert) {
  sorts(1, 1, 1, 0, 1, 1);
  sorts(700, 2, 8, 0, 1, 4);
  sorts(513, 3, 7, 5, 1, 2);
  sorts(300, 8, 128, 16, 1, 16);
  sorts(90, 4, 300, 0, 1, 300);        // more experts than a block has threads
  sorts(300000 / 8, 8, 64, 60, 1, 4);  // more blocks than a block has threads
  sorts(0, 2, 8, 0, 1, 3);
  sorts(40, 2, 8, 8, 1, 3);  // nobody goes there
}

TEST(a_row_goes_to_a_rank_once) {
  sorts(300, 8, 16, 0, 4, 4);
  sorts(200, 4, 10, 0, 3, 4);  // the last one has fewer
  sorts(500, 8, 128, 32, 32, 1);
}

template <class T>
void sums(int64_t rows, int slots, int64_t columns, int64_t shift) {
  const int experts = 2 * slots;
  const std::vector<float> table = routes_table(rows, slots, experts, 3);
  const Found found = expected(table, rows, slots, 1, 1, slots);
  const int64_t size = found.rows_of.size();
  const std::vector<T> values = random_values<T>(shift + size * columns, 5);
  std::vector<T> y = poison<T>(shift + rows * columns);
  const PyruntimePlaceSums given{
      dtype_of<T>(),         slots,           rows, columns, size, found.positions.data(),
      values.data() + shift, y.data() + shift};
  EXPECT_OK(pyruntime_sum_places(&given, nullptr));
  std::vector<float> wanted(rows * columns);
  for (int64_t at = 0; at < size; ++at) {
    for (int64_t column = 0; column < columns; ++column)
      wanted[found.rows_of[at] * columns + column] += to_float(values[shift + at * columns + column]);
  }
  for (int64_t i = 0; i < rows * columns; ++i) {
    const T rounded = portable::round_to<T>(wanted[i]);
    EXPECT(std::memcmp(&rounded, &y[shift + i], sizeof(T)) == 0);
  }
}

TEST(a_row_is_summed_in_the_order_of_its_experts) {
  sums<Bf16>(130, 8, 264, 0);
  sums<Bf16>(9, 2, 33, 3);
  sums<Fp16>(17, 3, 40, 0);
  sums<float>(65, 4, 20, 0);
  sums<float>(3, 1, 5, 1);
  sums<float>(0, 1, 5, 0);
}

TEST(routes_are_refused_for_every_wrong_argument) {
  const std::vector<float> table = routes_table(4, 2, 8, 1);
  std::vector<int64_t> numbers(8);
  std::vector<int32_t> scratch(8);
  using Change = void (*)(PyruntimeRoutes&);
  const std::vector<std::pair<Change, std::string>> cases{
      {[](auto& r) { r.rows = -1; }, "rows=-1, slots=2;"},
      {[](auto& r) { r.slots = 0; }, "slots=0;"},
      {[](auto& r) { r.rows = int64_t{1} << 31; }, "all together are below 2^31"},
      {[](auto& r) { r.first = -1; }, "first=-1, per=1, groups=4;"},
      {[](auto& r) { r.per = 0; }, "per=0"},
      {[](auto& r) { r.groups = 0; }, "groups=0"},
      {[](auto& r) { r.counts = nullptr; }, "counts is a null pointer"},
      {[](auto& r) { r.table = nullptr; }, "one of table, scratch and rows_of is a null pointer"},
      {[](auto& r) { r.scratch = nullptr; }, "one of table, scratch and rows_of is a null pointer"},
      {[](auto& r) { r.rows_of = nullptr; }, "one of table, scratch and rows_of is a null pointer"},
  };
  for (const auto& [change, words] : cases) {
    PyruntimeRoutes routes = routes_of(table, 4, 2, 0, 1, 4);
    routes.counts = routes.rows_of = numbers.data();
    routes.scratch = scratch.data();
    change(routes);
    EXPECT_EQ(pyruntime_sort_routes(&routes, nullptr), PYRUNTIME_INVALID);
    EXPECT(std::string(pyruntime_error()).find("sort_routes: ") == 0);
    EXPECT(std::string(pyruntime_error()).find(words) != std::string::npos);
  }
}

}  // namespace
