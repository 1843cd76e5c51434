// What a link between hosts costs, found from the time of a few exchanges.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "transport/ring/cost.h"

namespace {

using pyruntime::link_cost_of;
using pyruntime::LinkCost;

// A link of 0.1 ms and 120 MB/s, whose first `disturbed` exchanges take so many seconds at least.
LinkCost measured_beside_other_work(int disturbed, double busy_s, int* probes) {
  const auto seconds = [&, disturbed, busy_s](int64_t bytes) {
    const double own_s = 1e-4 + static_cast<double>(bytes) / 120e6;
    return ++*probes > disturbed ? own_s : std::max(own_s, busy_s + 1e-6 * (disturbed - *probes));
  };
  return link_cost_of(seconds, [](const std::vector<double>& own) { return own; });
}

TEST(a_link_is_measured_again_where_other_work_hides_what_bytes_cost) {
  int probes = 0;
  const LinkCost quiet = measured_beside_other_work(0, 0, &probes);
  EXPECT(std::abs(quiet.latency_s - 1.085e-4) < 1e-6 && std::abs(quiet.seconds_per_byte * 120e6 - 1) < 0.01);
  EXPECT_EQ(probes, 24);
  for (const int disturbed : {24, 32, 40}) {  // the first slope falls: "3.45e+03 us and 1e+06 MB/s"
    probes = 0;
    const LinkCost cost = measured_beside_other_work(disturbed, 3.45e-3, &probes);
    EXPECT(cost.latency_s < 4e-3 && std::abs(cost.seconds_per_byte * 120e6 - 1) < 0.2);
  }
  probes = 0;  // and where it always hides them, they are not free
  const LinkCost hidden = measured_beside_other_work(100, 0.1, &probes);
  EXPECT_EQ(probes, 72);
  EXPECT(std::abs(hidden.seconds_per_byte - 0.1 / (1 << 22)) < 1e-9);
}

}  // namespace
