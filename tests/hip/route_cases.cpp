// The order of routed rows, and sums in that order, against plain loops.
#include <algorithm>
#include <functional>

#include "layer_cases.h"

namespace run {

namespace {

template <class T>
void expect_same(const char* name, std::vector<T> found, const std::vector<T>& wanted) {
  found.resize(wanted.size());
  const auto [at, other] = std::mismatch(found.begin(), found.end(), wanted.begin());
  if (at != found.end()) throw std::runtime_error(name + std::to_string(at - found.begin()) + "] is another");
}

// Rows whose experts follow one another from any of them on, here and there none.
std::vector<float> table_of(int64_t rows, int slots, int experts) {
  std::vector<float> table;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row * row * 7 + row;
    for (int slot = 0; slot < slots; ++slot)
      table.push_back(static_cast<float>((row + slot) % 13 == 0 ? -1 : (first + slot) % experts));
    for (int slot = 0; slot < slots; ++slot) table.push_back(static_cast<float>(row) + slot / 16.0f);
  }
  return table;
}

// A row of width `columns` is made of each place, and those of a row are summed.
template <class T>
void routes(Rank& rank, int64_t rows, int slots, int experts, int first, int per, int groups,
            int64_t columns) {
  const std::vector<float> table = table_of(rows, slots, experts);
  std::vector<int64_t> counts(groups), rows_of, places;
  std::vector<float> weights;
  std::vector<int32_t> positions(rows * slots, -1);
  for (int group = 0; group < groups; ++group) {
    for (int64_t place = 0; place < rows * slots; ++place) {
      const int64_t row = place / slots, in_row = row * 2 * slots + place % slots;
      const int expert = static_cast<int>(table[in_row]) - first - group * per;
      if (expert < 0 || expert >= per) continue;
      if (per > 1 && counts[group] > 0 && rows_of.back() == row) continue;
      ++counts[group];
      positions[place] = static_cast<int32_t>(rows_of.size());
      rows_of.push_back(row);
      places.push_back(place);
      weights.push_back(table[in_row + slots]);
    }
  }
  const Buffer<float> on_table(table), of_weights(rows * slots);
  const Buffer<int64_t> of_counts(groups), of_rows(rows * slots), of_places(rows * slots);
  const Buffer<int32_t> scratch(pyruntime_sort_routes_scratch(rows, slots, groups)),
      of_positions(rows * slots);
  const PyruntimeRoutes given{rows,
                              slots,
                              first,
                              per,
                              groups,
                              on_table.data(),
                              of_counts.data(),
                              scratch.data(),
                              of_rows.data(),
                              of_places.data(),
                              of_weights.data(),
                              of_positions.data()};
  ok(pyruntime_sort_routes(&given, rank.stream()));
  const auto held = static_cast<int64_t>(rows_of.size());
  const std::vector<T> values = random_values<T>(held * columns, 4);
  const Buffer<T> on_values(values), y(rows * columns);
  const PyruntimePlaceSums sums{dtype_of<T>(),    slots,   rows, columns, held, of_positions.data(),
                                on_values.data(), y.data()};
  ok(pyruntime_sum_places(&sums, rank.stream()));
  wait(rank);
  expect_same("counts[", of_counts.read(), counts);
  expect_same("rows_of[", of_rows.read(), rows_of);
  expect_same("places[", of_places.read(), places);
  expect_same("weights[", of_weights.read(), weights);
  expect_same("positions[", of_positions.read(), positions);
  std::vector<float> wanted(rows * columns);
  for (int64_t at = 0; at < held; ++at) {
    for (int64_t column = 0; column < columns; ++column)
      wanted[rows_of[at] * columns + column] += static_cast<float>(value(values[at * columns + column]));
  }
  const std::vector<T> found = y.read();
  for (int64_t i = 0; i < rows * columns; ++i) {
    if (value(found[i]) != value(rounded<T>(wanted[i])))
      throw std::runtime_error("y[" + std::to_string(i / columns) + ", " + std::to_string(i % columns) +
                               "] is another sum");
  }
  on_table.read();
  on_values.read();
}

}  // namespace

void add_route_cases(std::vector<Case>& cases) {
  const auto add = [&](const std::string& name, const std::function<void(Rank&)>& body) {
    cases.push_back({name, 1, Kind::kThreads, body});
  };
  add("routes bf16, 16 of 128 experts", [](Rank& r) { routes<Bf16>(r, 1500, 8, 128, 32, 1, 16, 264); });
  add("routes bf16, more experts than threads", [](Rank& r) { routes<Bf16>(r, 130, 4, 300, 0, 1, 300, 33); });
  add("routes fp16, once a rank", [](Rank& r) { routes<Fp16>(r, 700, 4, 10, 0, 3, 4, 40); });
  add("routes fp32, nobody", [](Rank& r) { routes<float>(r, 90, 2, 8, 8, 1, 3, 20); });
}

}  // namespace run
