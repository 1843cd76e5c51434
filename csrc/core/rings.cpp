#include "core/rings.h"

#include <algorithm>

namespace pyruntime {

int Rings::before(int way, int rank, int steps) const {
  const int rings = static_cast<int>(orders_.size());
  const std::vector<int>& order = orders_[way % rings];
  const int ranks = static_cast<int>(order.size());
  const auto place = static_cast<int>(std::find(order.begin(), order.end(), rank) - order.begin());
  const int back = way < rings ? steps : -steps;
  return order[((place - back) % ranks + ranks) % ranks];
}

std::vector<Chunk> Rings::gather_order(const ChunkPlan& plan) const {
  const int rank = plan.own().owner;
  std::vector<Chunk> order{plan.own()};
  for (int step = 1; step < plan.world_size(); ++step) {
    for (int way = 0, end = 0; way < ways(); way = end) {
      const int owner = before(way, rank, step);
      for (end = way + 1; end < ways() && before(end, rank, step) == owner; ++end) {
      }
      order.push_back(plan.run(owner, way, end - way));
    }
  }
  return order;
}

std::string Rings::why_not(int world_size) const {
  for (const std::vector<int>& order : orders_) {
    std::vector<int> ranks(order);
    std::sort(ranks.begin(), ranks.end());
    bool is_each = static_cast<int>(ranks.size()) == world_size;
    for (int rank = 0; is_each && rank < world_size; ++rank) is_each = ranks[rank] == rank;
    if (!is_each) {
      return "the ring " + Rings({order}).text() + " does not name each of " + std::to_string(world_size) +
             " ranks once; give orders of 0 to " + std::to_string(world_size - 1) + ", or leave rings out.";
    }
  }
  return "";
}

std::string Rings::text() const {
  std::string text;
  for (const std::vector<int>& order : orders_) {
    if (!text.empty()) text += ", ";
    for (size_t at = 0; at < order.size(); ++at) text += (at == 0 ? "" : "-") + std::to_string(order[at]);
  }
  return text;
}

std::vector<int> Rings::flat() const {
  std::vector<int> ranks;
  for (const std::vector<int>& order : orders_) ranks.insert(ranks.end(), order.begin(), order.end());
  return ranks;
}

}  // namespace pyruntime
