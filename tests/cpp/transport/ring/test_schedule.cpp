#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/chunk_plan.h"
#include "transport/ring/cost.h"
#include "transport/ring/ring.h"
#include "transport/ring/schedule.h"

namespace {

using pyruntime::Chunk;
using pyruntime::ChunkPlan;
using pyruntime::HostLayout;
using pyruntime::LinkCost;
using pyruntime::other_ring_pieces;
using pyruntime::ring_pieces;
using pyruntime::ring_send_pieces;
using pyruntime::ring_streams;
using pyruntime::RingItem;
using pyruntime::RingOptions;
using pyruntime::RingPhase;
using pyruntime::RingStream;

using Place = std::pair<int, int>;  // an owner, a host or a rank, and a piece
using Hosts = std::set<int>;

constexpr int kMostHosts = 6;
constexpr int kMostRanksPerHost = 3;
constexpr int kMostPieces = 6;

Place place(const RingItem& item) {
  return {item.owner_host, item.piece};
}

// Any number of pieces; with two streams ring_pieces() makes them even.
template <typename Body>
void for_every_ring(const Body& body) {
  for (int hosts = 2; hosts <= kMostHosts; ++hosts) {
    const int step = hosts > 2 ? 2 : 1;
    for (int pieces = step; pieces <= kMostPieces; pieces += step) body(hosts, pieces);
  }
}

// Host names by rank: block by block, or dealt out in turn.
std::vector<std::string> names_of(int hosts, int ranks_per_host, bool dealt) {
  std::vector<std::string> names;
  for (int rank = 0; rank < hosts * ranks_per_host; ++rank) {
    names.push_back("host" + std::to_string(dealt ? rank % hosts : rank / ranks_per_host));
  }
  return names;
}

// body(layout, plan, most pieces at once) for every rank of every layout.
template <typename Body>
void for_every_rank(const Body& body) {
  for_every_ring([&](int hosts, int pieces) {
    for (int ranks_per_host = 1; ranks_per_host <= kMostRanksPerHost; ++ranks_per_host) {
      const int world_size = hosts * ranks_per_host;
      for (const bool dealt : {false, true}) {
        for (int rank = 0; rank < world_size; ++rank) {
          const HostLayout layout(names_of(hosts, ranks_per_host, dealt), rank);
          const ChunkPlan plan(5 * world_size + 1, world_size, rank, pieces);
          for (const int most : {1, 2, 3, kMostPieces}) body(layout, plan, most);
        }
      }
    }
  });
}

// --- the ring

TEST(every_piece_takes_one_stream_and_streams_join_neighbours) {
  for_every_ring([](int hosts, int pieces) {
    for (int host = 0; host < hosts; ++host) {
      const std::vector<RingStream> streams = ring_streams(hosts, host, pieces);
      EXPECT_EQ(streams.size(), hosts > 2 ? 2u : 1u);
      std::multiset<int> taken;
      for (const RingStream& stream : streams) {
        taken.insert(stream.pieces.begin(), stream.pieces.end());
        // The neighbours see the same stream from its other ends.
        EXPECT_EQ(ring_streams(hosts, stream.downstream, pieces)[stream.index].upstream, host);
        EXPECT_EQ(ring_streams(hosts, stream.upstream, pieces)[stream.index].downstream, host);
        EXPECT(stream.upstream != host);
      }
      std::multiset<int> all;
      for (int piece = 0; piece < pieces; ++piece) all.insert(piece);
      EXPECT(taken == all);
      if (hosts > 2) EXPECT_EQ(streams[0].downstream, streams[1].upstream);
    }
  });
}

TEST(a_host_receives_what_its_upstream_neighbour_sends_in_the_same_order) {
  for_every_ring([](int hosts, int pieces) {
    for (const RingPhase phase : {RingPhase::kGather, RingPhase::kScatter}) {
      for (int host = 0; host < hosts; ++host) {
        for (const RingStream& stream : ring_streams(hosts, host, pieces)) {
          const auto received = ring_receives(phase, stream, hosts);
          const RingStream theirs = ring_streams(hosts, stream.upstream, pieces)[stream.index];
          const auto sent = ring_sends(phase, theirs, hosts, stream.upstream);
          EXPECT_EQ(received.size(), sent.size());
          EXPECT_EQ(sent.size(), stream.pieces.size() * (hosts - 1));
          for (size_t i = 0; i < std::min(sent.size(), received.size()); ++i) {
            EXPECT(place(received[i]) == place(sent[i]));
          }
        }
      }
    }
  });
}

TEST(an_item_leaves_after_the_same_rows_have_come_one_hop_earlier) {
  for_every_ring([](int hosts, int pieces) {
    for (const RingPhase phase : {RingPhase::kGather, RingPhase::kScatter}) {
      for (int host = 0; host < hosts; ++host) {
        for (const RingStream& stream : ring_streams(hosts, host, pieces)) {
          const auto sends = ring_sends(phase, stream, hosts, host);
          const auto receives = ring_receives(phase, stream, hosts);
          for (size_t i = stream.pieces.size(); i < sends.size(); ++i) {
            EXPECT(place(sends[i]) == place(receives[i - stream.pieces.size()]));
          }
        }
      }
    }
  });
}

// Runs all hosts' sends, each as soon as the ring allows it: `leave(host, item, came)` makes what travels of
// what came one hop earlier (nullptr: nothing did), `arrive(host, item, thing)` takes it in. Returns false
// when the ring comes to a halt before everything has been sent.
template <typename Thing, typename Leave, typename Arrive>
bool run_ring(RingPhase phase, int hosts, int pieces, const Leave& leave, const Arrive& arrive) {
  std::map<std::pair<int, int>, std::vector<Thing>> came;  // by (host, stream)
  std::map<std::pair<int, int>, size_t> sent;
  bool moved = true;
  bool all_sent = false;
  while (moved && !all_sent) {
    moved = false;
    all_sent = true;
    for (int host = 0; host < hosts; ++host) {
      for (const RingStream& stream : ring_streams(hosts, host, pieces)) {
        const auto sends = ring_sends(phase, stream, hosts, host);
        const size_t own = stream.pieces.size();
        size_t& next = sent[{host, stream.index}];
        const auto& before = came[{host, stream.index}];
        while (next < sends.size() && (next < own || next - own < before.size())) {
          const Thing thing = leave(host, sends[next], next < own ? nullptr : &before[next - own]);
          came[{stream.downstream, stream.index}].push_back(thing);
          arrive(stream.downstream, sends[next], thing);
          ++next;
          moved = true;
        }
        all_sent = all_sent && next == sends.size();
      }
    }
  }
  return all_sent;
}

TEST(a_gather_brings_every_piece_to_every_other_host_once) {
  for_every_ring([](int hosts, int pieces) {
    std::map<std::pair<int, Place>, int> times;  // by (host, piece)
    const auto leave = [&](int host, const RingItem& item, const Place* came) {
      EXPECT(came == nullptr ? item.owner_host == host : *came == place(item));
      return place(item);
    };
    const auto arrive = [&](int host, const RingItem& item, const Place& thing) {
      EXPECT(thing == place(item));
      ++times[{host, place(item)}];
    };
    EXPECT(run_ring<Place>(RingPhase::kGather, hosts, pieces, leave, arrive));
    EXPECT_EQ(times.size(), static_cast<size_t>(hosts * (hosts - 1) * pieces));
    for (const auto& [where, count] : times) {
      EXPECT_EQ(count, 1);
      EXPECT(where.first != where.second.first);
    }
  });
}

TEST(a_scatter_takes_each_sum_past_every_other_host_once_and_to_its_owner) {
  for_every_ring([](int hosts, int pieces) {
    struct Sum {
      Place of;
      Hosts over;
    };
    std::map<Place, std::vector<Hosts>> ended;
    const auto leave = [&](int host, const RingItem& item, const Sum* came) {
      EXPECT(item.owner_host != host);
      Sum sum = came == nullptr ? Sum{place(item), {}} : *came;
      EXPECT(sum.of == place(item));
      EXPECT(sum.over.insert(host).second);
      return sum;
    };
    const auto arrive = [&](int host, const RingItem& item, const Sum& sum) {
      if (item.owner_host == host) ended[place(item)].push_back(sum.over);
    };
    EXPECT(run_ring<Sum>(RingPhase::kScatter, hosts, pieces, leave, arrive));
    EXPECT_EQ(ended.size(), static_cast<size_t>(hosts * pieces));
    for (const auto& [of, sums] : ended) {
      Hosts others;
      for (int host = 0; host < hosts; ++host) {
        if (host != of.first) others.insert(host);
      }
      EXPECT_EQ(sums.size(), 1u);
      EXPECT(sums.front() == others);
    }
  });
}

// --- the order of visits

std::vector<Place> places_of(const std::vector<Chunk>& order, const ChunkPlan& plan) {
  std::vector<Place> places;
  for (const Chunk& chunk : order) {
    const int first = chunk.is_whole() ? 0 : chunk.piece;
    const int count = chunk.is_whole() ? plan.pieces() : chunk.pieces;
    int64_t rows = 0;
    for (int piece = first; piece < first + count; ++piece) {
      places.emplace_back(chunk.owner, piece);
      if (piece == first) EXPECT_EQ(chunk.begin, plan.piece(chunk.owner, piece).begin);
      rows += plan.piece(chunk.owner, piece).rows;
    }
    EXPECT_EQ(chunk.rows, rows);
  }
  return places;
}

TEST(every_order_visits_every_piece_of_every_rank_once) {
  for_every_rank([](const HostLayout& layout, const ChunkPlan& plan, int most) {
    for (const auto& order :
         {ring_gather_order(layout, plan, most), ring_scatter_order(layout, plan, most)}) {
      const std::vector<Place> places = places_of(order, plan);
      EXPECT_EQ(places.size(), static_cast<size_t>(plan.world_size() * plan.pieces()));
      EXPECT_EQ(std::set<Place>(places.begin(), places.end()).size(), places.size());
    }
  });
}

TEST(a_gather_begins_and_a_scatter_ends_with_the_own_rows_and_the_own_host) {
  for_every_rank([](const HostLayout& layout, const ChunkPlan& plan, int most) {
    const int own = plan.own().owner;
    const auto gathered = ring_gather_order(layout, plan, most);
    EXPECT(gathered.front().is_whole());
    EXPECT_EQ(gathered.front().owner, own);
    const auto here = static_cast<size_t>(layout.ranks_per_host() * plan.pieces());
    const auto gather = places_of(gathered, plan);
    const auto scatter = places_of(ring_scatter_order(layout, plan, most), plan);
    for (size_t i = 0; i < here; ++i) {
      EXPECT_EQ(layout.host_of(gather[i].first), layout.host());
      EXPECT_EQ(layout.host_of(scatter[scatter.size() - 1 - i].first), layout.host());
    }
    for (int i = 0; i < plan.pieces(); ++i) EXPECT_EQ(scatter[scatter.size() - 1 - i].first, own);
  });
}

// What is visited of a rail and a stream, as (host, piece).
std::vector<Place> on_stream(const std::vector<Chunk>& order, const ChunkPlan& plan, const HostLayout& layout,
                             const RingStream& stream, int rail) {
  std::vector<Place> result;
  for (const auto& [owner, piece] : places_of(order, plan)) {
    const int host = layout.host_of(owner);
    if (host == layout.host() || layout.local_rank_of(owner) != rail) continue;
    const bool here = std::find(stream.pieces.begin(), stream.pieces.end(), piece) != stream.pieces.end();
    if (here) result.emplace_back(host, piece);
  }
  return result;
}

TEST(rows_are_visited_as_the_ring_brings_them_and_sums_are_made_as_it_takes_them) {
  for_every_rank([](const HostLayout& layout, const ChunkPlan& plan, int most) {
    for (const RingStream& stream : ring_streams(layout.hosts(), layout.host(), plan.pieces())) {
      std::vector<Place> coming, going;
      for (const RingItem& item : ring_receives(RingPhase::kGather, stream, layout.hosts())) {
        coming.push_back(place(item));
      }
      for (const RingItem& item : ring_sends(RingPhase::kScatter, stream, layout.hosts(), layout.host())) {
        going.push_back(place(item));
      }
      for (int rail = 0; rail < layout.ranks_per_host(); ++rail) {
        EXPECT(on_stream(ring_gather_order(layout, plan, most), plan, layout, stream, rail) == coming);
        EXPECT(on_stream(ring_scatter_order(layout, plan, most), plan, layout, stream, rail) == going);
      }
    }
  });
}

TEST(a_scatter_starts_and_a_gather_ends_with_single_pieces_and_the_rest_goes_several_at_once) {
  for_every_rank([](const HostLayout& layout, const ChunkPlan& plan, int most) {
    const auto gathered = ring_gather_order(layout, plan, most);
    const auto scattered = ring_scatter_order(layout, plan, most);
    // The last and the first of each stream and rail.
    const int of_streams = (layout.hosts() > 2 ? 2 : 1) * layout.ranks_per_host();
    for (int i = 0; i < of_streams; ++i) {
      EXPECT_EQ(gathered[gathered.size() - 1 - i].pieces, 1);
      EXPECT_EQ(scattered[i].pieces, 1);
    }
    int largest = 0;
    for (const auto& order : {gathered, scattered}) {
      for (const Chunk& chunk : order) {
        if (chunk.is_whole()) continue;
        EXPECT(chunk.pieces >= 1 && chunk.pieces <= most);
        largest = std::max(largest, chunk.pieces);
      }
    }
    // Between the ends of the way as many as may be, where there are so many.
    const int of_stream = plan.pieces() / (layout.hosts() > 2 ? 2 : 1);
    if (layout.hosts() > 2) EXPECT_EQ(largest, std::min(most, of_stream));
  });
}

TEST(runs_grow_from_one_piece_and_cover_all) {
  for (int pieces = 1; pieces <= 40; ++pieces) {
    for (const int most : {1, 2, 3, 8, 100}) {
      const std::vector<int> runs = pyruntime::growing_runs(pieces, most);
      int done = 0;
      for (const int run : runs) {
        EXPECT(run >= 1 && run <= most && run <= std::max(1, done));
        done += run;
      }
      EXPECT_EQ(done, pieces);
    }
  }
  EXPECT(pyruntime::growing_runs(20, 4) == std::vector<int>({1, 1, 2, 4, 4, 4, 4}));
}

// --- where the ranks are

TEST(hosts_are_numbered_by_their_lowest_rank_wherever_their_ranks_are) {
  const std::vector<std::string> names{"b", "a", "b", "c", "a", "c"};
  const std::vector<int> host_of{0, 1, 0, 2, 1, 2};
  const std::vector<int> local_of{0, 0, 1, 0, 1, 1};
  for (int rank = 0; rank < 6; ++rank) {
    const HostLayout layout(names, rank);
    EXPECT_EQ(layout.hosts(), 3);
    EXPECT_EQ(layout.ranks_per_host(), 2);
    EXPECT(layout.even());
    EXPECT_EQ(layout.host(), host_of[rank]);
    EXPECT_EQ(layout.local_rank(), local_of[rank]);
    for (int peer = 0; peer < 6; ++peer) {
      EXPECT_EQ(layout.host_of(peer), host_of[peer]);
      EXPECT_EQ(layout.local_rank_of(peer), local_of[peer]);
      EXPECT_EQ(layout.rank_at(host_of[peer], local_of[peer]), peer);
      EXPECT_EQ(layout.ranks_of(host_of[peer])[local_of[peer]], peer);
    }
  }
}

TEST(a_layout_is_even_only_when_all_hosts_have_as_many_ranks) {
  EXPECT(HostLayout({"a", "a", "b", "b"}, 0).even());
  EXPECT(!HostLayout({"a", "a", "b"}, 2).even());
  EXPECT(!HostLayout({"a", "b", "b"}, 0).even());
  EXPECT(HostLayout({"a", "a", "a"}, 1).even());
  EXPECT_EQ(HostLayout({"a", "a", "a"}, 1).hosts(), 1);
}

TEST(without_shared_memory_every_rank_is_a_host_of_its_own) {
  for (int world_size = 2; world_size <= 5; ++world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      const HostLayout layout = HostLayout::one_rank_each(world_size, rank);
      EXPECT_EQ(layout.hosts(), world_size);
      EXPECT_EQ(layout.ranks_per_host(), 1);
      EXPECT(layout.even());
      for (int peer = 0; peer < world_size; ++peer) EXPECT_EQ(layout.host_of(peer), peer);
      EXPECT_EQ(layout.host(), rank);
    }
  }
}

TEST(neighbours_are_the_same_rail_of_the_next_hosts_and_see_each_other) {
  for_every_rank([](const HostLayout& layout, const ChunkPlan& plan, int) {
    const std::vector<int> neighbours = pyruntime::ring_neighbours(layout);
    EXPECT_EQ(neighbours.size(), layout.hosts() > 2 ? 2u : 1u);
    EXPECT_EQ(std::set<int>(neighbours.begin(), neighbours.end()).size(), neighbours.size());
    for (const int peer : neighbours) {
      EXPECT_EQ(layout.local_rank_of(peer), layout.local_rank());
      EXPECT(layout.host_of(peer) != layout.host());
      // The layout from the neighbour's side.
      std::vector<std::string> names;
      for (int rank = 0; rank < plan.world_size(); ++rank)
        names.push_back(std::to_string(layout.host_of(rank)));
      const auto theirs = pyruntime::ring_neighbours(HostLayout(names, peer));
      EXPECT(std::find(theirs.begin(), theirs.end(), plan.own().owner) != theirs.end());
    }
  });
}

// --- how many pieces

constexpr int kMostPiecesEver = 64;
constexpr int64_t kTileRows = 64;
const LinkCost kSlowLink{1e-3, 1e-8};
const LinkCost kFastLink{20e-6, 1e-10};

// body(bytes, hosts, cost), bytes growing within the same hosts and cost.
template <typename Body>
void for_every_size(const Body& body) {
  for (const int hosts : {2, 3, 6}) {
    for (const LinkCost& cost : {kSlowLink, kFastLink}) {
      for (int64_t bytes = 0; bytes < (int64_t{1} << 34); bytes = bytes * 3 / 2 + 7) body(bytes, hosts, cost);
    }
  }
}

TEST(pieces_are_within_bounds_and_even_where_two_streams_share_them) {
  for_every_size([](int64_t bytes, int hosts, const LinkCost& cost) {
    for (const bool with_matmul : {false, true}) {
      for (const int64_t rows : {0, 1, 63, 64, 65, 200, 1000, 100000}) {
        for (const int64_t chunk_bytes : {0, 1, 1000, 1 << 20}) {
          const int pieces = ring_pieces(bytes, rows, with_matmul, hosts, cost, {chunk_bytes});
          EXPECT(pieces >= 1 && pieces <= kMostPiecesEver);
          EXPECT(hosts == 2 || pieces % 2 == 0);
        }
      }
    }
  });
}

TEST(more_bytes_are_never_cut_into_fewer_pieces) {
  for (const bool with_matmul : {false, true}) {
    std::map<std::pair<int, double>, int> before;  // by link
    for_every_size([&](int64_t bytes, int hosts, const LinkCost& cost) {
      const int pieces = ring_pieces(bytes, 2000, with_matmul, hosts, cost, {});
      int& fewer = before[{hosts, cost.latency_s}];
      EXPECT(pieces >= fewer);
      fewer = pieces;
    });
    EXPECT_EQ((before[{2, kSlowLink.latency_s}]), with_matmul ? 2000 / 64 : kMostPiecesEver);
  }
}

TEST(the_number_of_pieces_balances_latency_against_transfer) {
  for (const int wanted : {1, 2, 3, 7, 12, 40}) {
    // The transfer takes wanted^2 latencies.
    const double latency = 1e-4, seconds_per_byte = 1e-9;
    const auto bytes = static_cast<int64_t>(std::llround(wanted * wanted * latency / seconds_per_byte)) - 1;
    EXPECT_EQ(ring_pieces(bytes, 1 << 20, true, 2, {latency, seconds_per_byte}, {}), wanted);
    EXPECT_EQ(ring_pieces(bytes, 1 << 20, true, 4, {latency, seconds_per_byte}, {}), (wanted + 1) / 2 * 2);
  }
}

TEST(a_piece_of_a_product_has_at_least_the_rows_of_a_tile) {
  for_every_size([](int64_t bytes, int hosts, const LinkCost& cost) {
    const int streams = hosts > 2 ? 2 : 1;
    for (const int64_t rows : {0, 1, 63, 64, 65, 127, 128, 200, 300, 1000, 5000}) {
      const int pieces = ring_pieces(bytes, rows, true, hosts, cost, {});
      // Each stream has a piece, however few the rows are.
      EXPECT(pieces == streams || rows / pieces >= kTileRows);
      // Rows bound products only.
      EXPECT_EQ(ring_pieces(bytes, rows, false, hosts, cost, {}),
                ring_pieces(bytes, 1 << 30, false, hosts, cost, {}));
    }
  });
}

TEST(a_size_that_was_asked_for_is_taken_whatever_the_link_costs) {
  for_every_size([](int64_t bytes, int hosts, const LinkCost& cost) {
    for (const int64_t chunk_bytes : {1, 100, 4096, 1 << 20}) {
      const int pieces = ring_pieces(bytes, 1, true, hosts, cost, {chunk_bytes});
      EXPECT(pieces == kMostPiecesEver || pieces * chunk_bytes >= bytes);
      EXPECT_EQ(pieces, ring_pieces(bytes, 1 << 20, false, hosts, LinkCost{1.0, 1.0}, {chunk_bytes}));
    }
  });
  EXPECT_EQ(ring_pieces(1000, 1, true, 2, kSlowLink, {100}), 10);
  EXPECT_EQ(ring_pieces(1001, 1, true, 2, kSlowLink, {100}), 11);
  EXPECT_EQ(ring_pieces(1001, 1, true, 3, kSlowLink, {100}), 12);
}

TEST(a_piece_of_what_is_read_whole_takes_8_ms_on_the_link_unless_its_size_is_fixed) {
  const LinkCost link{100e-6, 1e-8};  // 800,000 bytes in 8 ms
  EXPECT_EQ(ring_send_pieces(1, 2, link, {}), 1);
  EXPECT_EQ(ring_send_pieces(800'000, 2, link, {}), 1);
  EXPECT_EQ(ring_send_pieces(800'001, 2, link, {}), 2);
  EXPECT_EQ(ring_send_pieces(800'001, 3, link, {}), 2);  // both ways round, as many each
  EXPECT_EQ(ring_send_pieces(1 << 30, 2, link, {}), kMostPiecesEver);
  EXPECT_EQ(ring_send_pieces(1001, 2, link, {100}), 11);
}

TEST(other_numbers_of_pieces_are_half_and_twice_where_a_ring_can_have_them) {
  using Numbers = std::vector<int>;
  EXPECT(other_ring_pieces(8, 2) == (Numbers{4, 16}));
  EXPECT(other_ring_pieces(1, 2) == Numbers{2});
  EXPECT(other_ring_pieces(kMostPiecesEver, 2) == Numbers{kMostPiecesEver / 2});
  EXPECT(other_ring_pieces(10, 3) == (Numbers{6, 20}));  // both ways round, as many each
  EXPECT(other_ring_pieces(2, 3) == Numbers{4});
  for_every_size([](int64_t bytes, int hosts, const LinkCost& cost) {
    const int usual = ring_pieces(bytes, 2000, true, hosts, cost, {});
    EXPECT(pyruntime::why_no_ring_of_pieces(usual, hosts).empty());
    for (const int pieces : other_ring_pieces(usual, hosts)) {
      EXPECT(pieces != usual && pyruntime::why_no_ring_of_pieces(pieces, hosts).empty());
    }
  });
  for (const int pieces : {-1, 0, kMostPiecesEver + 1, 2 * kMostPiecesEver}) {
    EXPECT(!pyruntime::why_no_ring_of_pieces(pieces, 2).empty());
  }
  EXPECT(pyruntime::why_no_ring_of_pieces(3, 2).empty());
  EXPECT(!pyruntime::why_no_ring_of_pieces(3, 3).empty());
}

TEST(flags_suffice_for_the_most_pieces) {
  // Of each rank's rows a part, of each host's rows a sum: as RingFlight numbers them.
  EXPECT(pyruntime::ring_flags(6, 3) >= (6 + 3) * kMostPiecesEver);
}

}  // namespace
