#include "transport/host/one_host.h"

#include <numeric>
#include <utility>

#include "cpu/reduce.h"
#include "transport/flights.h"
#include "transport/host/host_workspace.h"

namespace pyruntime {

namespace {

// A gather: each rank's slot contains its rows.
class OneHostGather : public GatherByRank {
 public:
  OneHostGather(GroupContext& context, HostWorkspace& workspace, const FlightDescriptor& descriptor)
      : GatherByRank(context, descriptor),
        flight_(workspace.begin(descriptor, plan_.max_rows() * descriptor.row_bytes())) {}

  at::Tensor memory(const Chunk& chunk) override {
    return view_of(flight_->memory(chunk.owner), descriptor_, chunk);
  }
  void publish(const Chunk& /*chunk*/) override { flight_->publish(0); }
  void wait(const Chunk& chunk) override { flight_->wait(chunk.owner, 0); }
  bool has_come(const Chunk& chunk) const override { return flight_->ready(chunk.owner, 0); }
  void finish() override { flight_->finish(); }

 private:
  std::unique_ptr<HostFlight> flight_;
};

// A scatter: each rank's slot contains its part of all rows, chunk by chunk, so that what one owner reads is
// contiguous. Flag `owner`: the part of that owner's rows is written; P + owner: the owner's sums.
class OneHostScatter : public ScatterByRank {
 public:
  OneHostScatter(GroupContext& context, HostWorkspace& workspace, const FlightDescriptor& descriptor,
                 bool all, ChunkPlan plan)
      : ScatterByRank(descriptor, all, std::move(plan)),
        context_(context),
        flight_(workspace.begin(descriptor, descriptor.rows * descriptor.row_bytes())) {}

  at::Tensor part(const Chunk& chunk) override { return at(context_.rank, chunk); }
  void publish(const Chunk& chunk) override { flight_->publish(chunk.owner); }

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Chunk& own = plan_.own();
    // For all_reduce the sums replace this rank's part of its own rows, which only this rank reads.
    const at::Tensor target = all_ ? part(own) : out;
    std::vector<const void*> parts;
    for (int rank = 0; rank < plan_.world_size(); ++rank) {
      if (rank != own.owner) {
        Reading reading(context_, descriptor_.op, rank, begun_);
        flight_->wait(rank, own.owner);
        reading.came(static_cast<int64_t>(target.nbytes()));
      }
      parts.push_back(at(rank, own).const_data_ptr());
    }
    const Spending summing(context_, Entered::kSum, name_of(descriptor_.op));
    const at::Tensor row_bias = bias.defined() ? bias.contiguous() : bias;
    cpu::sum_in_rank_order(target.scalar_type(), target.data_ptr(), parts, target.numel(),
                           bias.defined() ? row_bias.const_data_ptr() : nullptr, descriptor_.width);
    if (all_) flight_->publish(plan_.world_size() + own.owner);
  }

  bool parts_have_come() const override {
    const int own = plan_.own().owner;
    for (int rank = 0; rank < plan_.world_size(); ++rank) {
      if (rank != own && !flight_->ready(rank, own)) return false;
    }
    return true;
  }

  void wait_for_sum(const Chunk& chunk) override {
    if (chunk.owner != context_.rank) flight_->wait(chunk.owner, plan_.world_size() + chunk.owner);
  }
  bool sum_has_come(const Chunk& chunk) const override {
    return chunk.owner == context_.rank || flight_->ready(chunk.owner, plan_.world_size() + chunk.owner);
  }
  at::Tensor sum(const Chunk& chunk) override { return at(chunk.owner, chunk); }
  void finish() override { flight_->finish(); }

 private:
  at::Tensor at(int rank, const Chunk& chunk) {
    return view_of(flight_->memory(rank) + chunk.begin * descriptor_.row_bytes(), descriptor_, chunk);
  }

  GroupContext& context_;
  std::unique_ptr<HostFlight> flight_;
};

class OneHostTransport : public Transport {
 public:
  OneHostTransport(GroupContext& context, std::unique_ptr<WorkspaceGroup> group) : Transport(context) {
    std::vector<int> ranks(context.world_size);
    std::iota(ranks.begin(), ranks.end(), 0);
    workspace_ = make_symmetric_workspace(context, std::move(group), std::move(ranks), context.rank,
                                          2 * context.world_size);
  }

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override {
    return std::make_unique<OneHostGather>(context_, *workspace_, descriptor);
  }
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override {
    return std::make_unique<OneHostScatter>(context_, *workspace_, descriptor, all, plan_of(descriptor));
  }
  std::unique_ptr<ScatterFlight> scatter_some(const FlightDescriptor& descriptor, bool all,
                                              const std::vector<int64_t>& rows) override {
    return std::make_unique<OneHostScatter>(context_, *workspace_, descriptor.of_some(rows), all,
                                            plan_of(descriptor).of_some(rows, /*pieces=*/1));
  }
  bool scatters_some() const override { return true; }
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override {
    auto flight = workspace_->begin(descriptor, 0);
    std::vector<int64_t> held(world_size());
    for (int peer = 0; peer < world_size(); ++peer) held[peer] = flight->rendezvous(peer).own_rows;
    flight->finish();
    return held;
  }
  bool crosses_hosts() const override { return false; }
  std::string description() const override {
    return "symmetric memory, " + std::to_string(world_size()) + " ranks of one host";
  }
  int64_t workspace_bytes() const override { return workspace_->bytes(); }

 private:
  ChunkPlan plan_of(const FlightDescriptor& descriptor) const {
    return {descriptor.rows, world_size(), rank()};
  }

  std::unique_ptr<HostWorkspace> workspace_;
};

}  // namespace

std::unique_ptr<Transport> make_one_host_transport(GroupContext& context,
                                                   std::unique_ptr<WorkspaceGroup> group) {
  return std::make_unique<OneHostTransport>(context, std::move(group));
}

}  // namespace pyruntime
