#include "transport/collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/job/peers.h"
#include "core/text.h"
#include "transport/flights.h"

// torch 2.13 renames _allgather_base and _reduce_scatter_base, deprecating these names; 2.11 has only these.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace pyruntime {

namespace {

// Rows padded to the largest share, because the process group's collectives take equal shares.
struct PaddedRows {
  PaddedRows(const FlightDescriptor& descriptor, const GroupContext& context)
      : plan(descriptor.rows, context.world_size, context.rank, /*pieces=*/1, descriptor.holder),
        inner(descriptor.inner),
        sizes{descriptor.row_blocks, plan.max_rows() * descriptor.inner, descriptor.width} {}

  std::vector<int64_t> sizes_of_all() const { return {plan.world_size(), sizes[0], sizes[1], sizes[2]}; }
  // The rows of `chunk` in `padded`, which has only its owner's rows.
  at::Tensor rows_of(const at::Tensor& padded, const Chunk& chunk) const {
    return padded.narrow(1, 0, chunk.rows * inner);
  }

  ChunkPlan plan;
  int64_t inner;
  std::vector<int64_t> sizes;  // of one rank's
};

at::Tensor as_fp32_if_half(const at::Tensor& t) {
  const bool is_half = t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
  return is_half ? t.to(at::kFloat) : t;
}

class CollectivesTransport : public Transport {
 public:
  CollectivesTransport(GroupContext& context, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                       c10::Device device, std::string why)
      : Transport(context), process_group_(std::move(process_group)), device_(device), why_(std::move(why)) {}

  std::unique_ptr<GatherFlight> gather(const FlightDescriptor& descriptor) override;
  std::unique_ptr<ScatterFlight> scatter(const FlightDescriptor& descriptor, bool all) override;
  std::vector<int64_t> rows_held(const FlightDescriptor& descriptor) override {
    const auto flight = gather(rows_held_descriptor(descriptor, world_size()));
    return gather_rows_held(*flight, descriptor.own_rows, rank(), world_size());
  }
  std::string why_not_chunked() const override { return why_; }
  bool crosses_hosts() const override { return false; }  // no chunk does
  std::string description() const override { return why_; }
  int64_t workspace_bytes() const override { return 0; }

  at::TensorOptions options_for(const FlightDescriptor& descriptor) const {
    return at::TensorOptions().dtype(descriptor.scalar_type()).device(device_);
  }
  c10d::ProcessGroup& process_group() const { return *process_group_; }
  c10::Device device() const { return device_; }
  std::chrono::milliseconds timeout() const { return milliseconds(context_.deadline_seconds); }
  // Runs a step of a collective. If it fails because a rank has ended or is stopped, all ranks name that rank
  // instead of the backend's message.
  template <typename Step>
  void collectively(Op op, const Step& step) const {
    try {
      step();
    } catch (const c10::DistError& error) {
      raise_for_missing(op, error.what());
    } catch (const std::runtime_error& error) {  // gloo's
      raise_for_missing(op, error.what());
    }
  }

 private:
  [[noreturn]] void raise_for_missing(Op op, const std::string& cause) const {
    std::vector<int> others;
    for (int peer = 0; peer < context_.world_size; ++peer) {
      if (peer != context_.rank) others.push_back(context_.job_rank(peer));
    }
    pyruntime::raise_for_missing(others,
                                 {name_of(op) + (" of group '" + context_.name) + "', " + context_.own_name(),
                                  context_.process_group, context_.deadline_seconds},
                                 first_line(cause));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  c10::Device device_;
  std::string why_;
};

class WholeGather : public GatherByRank {
 public:
  WholeGather(CollectivesTransport& transport, const FlightDescriptor& descriptor)
      : GatherByRank(transport.context(), descriptor),
        transport_(transport),
        rows_(descriptor, transport.context()),
        shared_(at::zeros(rows_.sizes, transport.options_for(descriptor))),
        all_(at::empty(rows_.sizes_of_all(), shared_.options())) {}

  at::Tensor memory(const Chunk& chunk) override {
    const bool is_own = chunk.owner == transport_.rank();
    return rows_.rows_of(is_own ? shared_ : all_.select(0, chunk.owner), chunk);
  }
  void publish(const Chunk& /*chunk*/) override {
    c10d::AllgatherOptions options;
    options.timeout = transport_.timeout();
    at::Tensor input = shared_.view({-1}), output = all_.view({-1});
    transport_.collectively(
        descriptor_.op, [&] { work_ = transport_.process_group()._allgather_base(output, input, options); });
  }
  void wait(const Chunk& /*chunk*/) override { finish(); }
  void finish() override {
    if (!work_) return;
    const Spending waiting(transport_.context(), Entered::kWait, name_of(descriptor_.op), /*peer=*/-1,
                           transport_.device());
    transport_.collectively(descriptor_.op, [&] { work_->wait(); });
    work_.reset();
  }

 private:
  CollectivesTransport& transport_;
  PaddedRows rows_;
  at::Tensor shared_;  // this rank's rows
  at::Tensor all_;     // every rank's, one after the other
  c10::intrusive_ptr<c10d::Work> work_;
};

class WholeScatter : public ScatterByRank {
 public:
  WholeScatter(CollectivesTransport& transport, const FlightDescriptor& descriptor, bool all)
      : ScatterByRank(transport.context(), descriptor, all),
        transport_(transport),
        rows_(descriptor, transport.context()),
        parts_(at::zeros(rows_.sizes_of_all(), transport.options_for(descriptor))) {}

  at::Tensor part(const Chunk& chunk) override { return rows_.rows_of(parts_.select(0, chunk.owner), chunk); }
  void publish(const Chunk& /*chunk*/) override {}

  void reduce(const at::Tensor& out, const at::Tensor& bias) override {
    const Spending waiting(transport_.context(), Entered::kWait, name_of(descriptor_.op), /*peer=*/-1,
                           transport_.device());
    const at::Tensor parts = as_fp32_if_half(parts_);
    at::Tensor sums = all_ ? all_reduced(parts) : reduce_scattered(parts);
    if (bias.defined()) sums.add_(bias);
    if (all_) {
      sums_ = std::move(sums);
    } else {
      out.copy_(rows_.rows_of(sums, rows_.plan.own()));
    }
  }

  void wait_for_sum(const Chunk& /*chunk*/) override {}
  at::Tensor sum(const Chunk& chunk) override { return rows_.rows_of(sums_.select(0, chunk.owner), chunk); }
  void finish() override {}

 private:
  at::Tensor all_reduced(const at::Tensor& parts) {
    std::vector<at::Tensor> sums{parts};
    c10d::AllreduceOptions options;
    options.timeout = transport_.timeout();
    transport_.collectively(descriptor_.op,
                            [&] { transport_.process_group().allreduce(sums, options)->wait(); });
    return sums[0];
  }

  at::Tensor reduce_scattered(const at::Tensor& parts) {
    at::Tensor sums = at::empty(rows_.sizes, parts.options());
    c10d::ReduceScatterOptions options;
    options.timeout = transport_.timeout();
    at::Tensor input = parts.view({-1}), output = sums.view({-1});
    transport_.collectively(descriptor_.op, [&] {
      transport_.process_group()._reduce_scatter_base(output, input, options)->wait();
    });
    return sums;
  }

  CollectivesTransport& transport_;
  PaddedRows rows_;
  at::Tensor parts_;  // by owner
  at::Tensor sums_;   // by owner; only with everybody's sums
};

std::unique_ptr<GatherFlight> CollectivesTransport::gather(const FlightDescriptor& descriptor) {
  ++context_.stats.ops;
  return std::make_unique<WholeGather>(*this, descriptor);
}

std::unique_ptr<ScatterFlight> CollectivesTransport::scatter(const FlightDescriptor& descriptor, bool all) {
  ++context_.stats.ops;
  return std::make_unique<WholeScatter>(*this, descriptor, all);
}

}  // namespace

std::unique_ptr<Transport> make_collectives_transport(GroupContext& context,
                                                      c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                                      c10::Device device, std::string why) {
  return std::make_unique<CollectivesTransport>(context, std::move(process_group), device, std::move(why));
}

}  // namespace pyruntime
