#include "transport/device/one_host.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "core/chunk_plan.h"
#include "transport/device/rocm_memory.h"
#include "transport/flights.h"

namespace pyruntime {

namespace {

namespace symm = c10d::symmetric_memory;

// The most pieces of a rank's rows in a gather for a GEMM, so that the last wait is for a fraction of them.
// More pieces would cost more in signals than they gain.
constexpr int kMostPieces = 4;
constexpr int64_t kPieceBytes = int64_t{4} << 20;
constexpr int64_t kFewestFlags = kMostPieces;

bool has_failure(const std::unique_ptr<DeviceWorkspace>& workspace) {
  return *workspace->stopped || has_failed(static_cast<const char*>(workspace->header_seen.const_data_ptr()));
}

// A tensor whose memory returns to its allocator with it.
at::Tensor tensor_of(const c10::intrusive_ptr<symm::SymmetricMemoryAllocator>& allocator, int64_t bytes,
                     c10::Device device) {
  return at::for_blob(allocator->alloc(bytes, device.index(), std::nullopt), {bytes})
      .deleter([allocator](void* memory) { allocator->free(memory); })
      .options(at::TensorOptions().dtype(c10::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

// Symmetric memory waits for its device when it is freed; a device that has failed would raise there, which
// ends the process. Its memory stays until the process ends.
DeviceWorkspace::~DeviceWorkspace() {
  WaitWatch::instance().remove(watched);
  if (!memory.defined()) return;
  try {
    DeviceStreams(memory.device()).synchronize();
  } catch (const std::exception&) {
    handle.release();
    memory.unsafeReleaseTensorImpl();
  }
}

std::string why_no_multicast(c10::Device device, const DeviceLibrary& library) {
  if (library.can_multicast() != PYRUNTIME_OK) return library.error();
  if (device.is_cpu() || symm::has_multicast_support(device.type(), device.index())) return "";
  return "torch finds no support for it in its device, driver and links.";
}

DeviceTransport::DeviceTransport(GroupContext& context, std::unique_ptr<WorkspaceGroup> group,
                                 PeerProcesses processes, c10::Device device, const DeviceLibrary& library,
                                 const GroupSettings& settings)
    : Transport(context),
      group_(std::move(group)),
      processes_(std::make_shared<const PeerProcesses>(std::move(processes))),
      device_(device),
      library_(library),
      piece_bytes_(settings.ring.chunk_bytes > 0 ? settings.ring.chunk_bytes : kPieceBytes),
      multicast_(settings.multicast),
      rings_(settings.rings),
      ring_orders_(rings_.flat()),
      streams_(device, rings_.ways()) {
  const ChunkPlan plan(/*rows=*/0, world_size(), rank(), std::max(1, rings_.ways()));
  const size_t chunks = rings_.gather_order(plan).size();
  TORCH_CHECK_VALUE(chunks <= PYRUNTIME_MOST_RANKS, "The rings ", rings_.text(), " of group '", context.name,
                    "' make ", chunks, " chunks of what comes to a rank; a fused GEMM takes ",
                    +PYRUNTIME_MOST_RANKS, ", so use fewer rings.");
}

void DeviceTransport::flush() {
  streams_.synchronize();
  if (std::any_of(workspaces_.begin(), workspaces_.end(), has_failure)) {
    TORCH_WARN("Group '", context_.name, "' on ", device_, " is closed after a wait that failed; ",
               "discard the results of its last ops.");
  }
}

std::string DeviceTransport::description() const {
  const char* also = multicast_ == Multicast::kOff ? ""
                     : multicast_ == Multicast::kGather
                         ? " with multicast of what goes to all"
                         : " with multicast of what goes to all and sums in the switch";
  const std::string around = rings_.empty() ? "" : " around the rings " + rings_.text();
  return "symmetric memory and copy engines" + std::string(also) + around + ", " +
         std::to_string(world_size()) + " ranks of one host";
}

int64_t DeviceTransport::workspace_bytes() const {
  int64_t total = 0;
  for (const auto& workspace : workspaces_) total += workspace->memory.numel();
  for (const Slot& slot : slots_) total += slot.staging.defined() ? slot.staging.numel() : 0;
  for (const at::Tensor& memory : kept_) total += memory.numel();
  return total;
}

int DeviceTransport::claim(Op op, int64_t bytes, int64_t flags) {
  raise_if_failed();
  const int slot = static_cast<int>(++last_number_ % slots_.size());
  check_slot_is_free(context_, !slots_[slot].in_flight, op, " on " + device_.str());
  const bool fits = !workspaces_.empty() && workspaces_.back()->shape.slot_bytes >= bytes &&
                    workspaces_.back()->shape.flags >= flags;
  if (!fits) grow(bytes, flags);
  slots_[slot].in_flight = true;
  ++context_.stats.ops;
  return slot;
}

void DeviceTransport::grow(int64_t bytes, int64_t flags) {
  TORCH_CHECK(!is_capturing(), "Group '", context_.name, "' needs a larger workspace on ", device_,
              ", which cannot be made while a CUDA graph is captured; run the ops once before.");
  auto made = std::make_unique<DeviceWorkspace>();
  const auto options = at::TensorOptions().dtype(c10::kByte).pinned_memory(!device_.is_cpu());
  made->header_seen = at::zeros({kDeviceHeaderBytes}, options);
  if (!workspaces_.empty()) {
    bytes = std::max(bytes, workspaces_.back()->shape.slot_bytes);
    flags = std::max<int64_t>(flags, workspaces_.back()->shape.flags);
  }
  made->shape = {world_size(), static_cast<int32_t>(power_of_two(std::max(flags, kFewestFlags))),
                 power_of_two(std::max(bytes, kLeastSlotBytes))};
  const int64_t total = library_.workspace_bytes(&made->shape);
  library_.check(total < 0 ? static_cast<int>(-total) : PYRUNTIME_OK);
  if (library_.hip) made->allocator = rocm_memory(device_.type(), *library_.hip);
  made->memory = made->allocator
                     ? tensor_of(made->allocator, total, device_)
                     : symm::empty_strided_p2p({total}, {1}, c10::kByte, device_, std::nullopt, std::nullopt);
  library_.check(library_.prepare_workspace(&made->shape, made->memory.data_ptr(), streams_.current()));
  streams_.synchronize();  // prepared before any peer can have its address
  raise_if_failed();       // in the older memory, which nobody checks from now on
  made->handle = group_->rendezvous(made->memory, context_.deadline_seconds, made->allocator.get());
  made->bases = made->handle->get_buffer_ptrs();
  if (multicast_ != Multicast::kOff) {
    // CPU memory has no such address. The host dialect of the kernels stores into every rank's copy, and
    // takes an address only because the other dialects do.
    made->multicast = device_.is_cpu() ? made->bases.at(rank()) : made->handle->get_multicast_ptr();
    TORCH_CHECK(made->multicast != nullptr, "multicast='", name_of(multicast_), "' was asked for group '",
                context_.name, "', and torch could not map its memory on ", device_,
                " under one address for all ranks; leave multicast out.");
  }
  made->watched = WaitWatch::instance().add(watched(*made));
  workspaces_.push_back(std::move(made));
}

WatchedWorkspace DeviceTransport::watched(const DeviceWorkspace& workspace) const {
  const PyruntimeGroup group{workspace.shape,
                             rank(),
                             /*slot=*/0,
                             static_cast<int64_t>(context_.deadline_seconds * 1e9),
                             workspace.bases.data(),
                             /*pieces=*/0,
                             /*rings=*/0,
                             ring_orders_.data()};
  const auto* seen = static_cast<const char*>(workspace.header_seen.const_data_ptr());
  return {&context_, &library_, device_, group, seen, processes_, workspace.stopped};
}

at::Tensor DeviceTransport::staging(int slot, int64_t bytes) {
  at::Tensor& memory = slots_[slot].staging;
  if (!memory.defined() || memory.numel() < bytes) {
    if (memory.defined() && was_captured_) kept_.push_back(memory);
    memory = at::empty({bytes}, at::TensorOptions().dtype(c10::kByte).device(device_));
  }
  return memory;
}

void DeviceTransport::raise_if_failed() {
  FailureBoard::instance().raise_if_failed();
  // Also checks outgrown workspaces: a graph captured with one may still be replayed.
  const auto found = std::find_if(workspaces_.begin(), workspaces_.end(), has_failure);
  if (found == workspaces_.end()) return;
  if (const auto failure = read_failure(watched(**found), streams_.current())) raise_for_all(*failure);
  FailureBoard::instance().raise_if_failed();
  raise_for_all(failure_of(context_, CommErrorKind::kBroken,
                           "group '" + context_.name + "' on " + device_.str() +
                               ": its waits were ended when a rank of the job failed; close the group on all "
                               "its ranks (comm.close), or end the job."));
}

// Depends only on what all ranks know, so that slots look alike on all, whichever tier each of them takes.
std::string DeviceTransport::why_not_fused(const FlightDescriptor& descriptor) const {
  const auto why = [](const auto&... words) { return c10::str(words...); };
  if (descriptor.op != Op::kAllGatherMatmul && descriptor.op != Op::kMatmulReduceScatter) {
    return "no fused kernel computes it";
  }
  const c10::ScalarType dtype = descriptor.scalar_type();
  if (dtype != c10::ScalarType::BFloat16 && dtype != c10::ScalarType::Half) {
    return why("the fused kernels multiply bfloat16 and float16, and this is ", dtype);
  }
  if (descriptor.row_blocks != 1) {
    return why("a rank's rows lie in ", descriptor.row_blocks,
               " blocks, and the fused kernels take one; cut dimension 0, or batches of one");
  }
  if (descriptor.inner != 1 && descriptor.rows % world_size() != 0) {
    return why("the fused kernels cut ", descriptor.rows, " x ", descriptor.inner,
               " rows elsewhere than between the ", descriptor.rows,
               "; make them a multiple of the number of ranks");
  }
  if (descriptor.width % 8 != 0 || descriptor.width == 0) {
    return why("rows of ", descriptor.width,
               " elements travel, and those of the fused kernels are multiples of 8 wide");
  }
  return "";
}

bool DeviceTransport::goes_around(const FlightDescriptor& descriptor) const {
  if (rings_.empty()) return false;
  const bool gathers = descriptor.op == Op::kAllGatherMatmul || descriptor.op == Op::kAllGather;
  // Pieces are cut between rows; the fused kernels cut between the `inner` parts of each row.
  const bool cuts = descriptor.inner == 1 || descriptor.rows % (world_size() * rings_.ways()) == 0;
  if (!gathers || descriptor.row_blocks != 1 || !cuts) return false;
  const int64_t bytes = rows_of_rank(descriptor.rows, world_size(), 0) * descriptor.row_bytes();
  return bytes / piece_bytes_ >= rings_.ways();
}

int DeviceTransport::pieces_of(const FlightDescriptor& descriptor) const {
  if (goes_around(descriptor)) return rings_.ways();
  if (descriptor.op != Op::kAllGatherMatmul || descriptor.row_blocks != 1) return 1;
  const int64_t bytes = rows_of_rank(descriptor.rows, world_size(), 0) * descriptor.row_bytes();
  return static_cast<int>(std::clamp<int64_t>(bytes / piece_bytes_, 1, kMostPieces));
}

int DeviceTransport::flags_of_part(const FlightDescriptor& descriptor, int64_t rows) const {
  if (descriptor.op != Op::kMatmulReduceScatter || !why_not_fused(descriptor).empty()) return 1;
  const auto pieces = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  return static_cast<int>(pieces(rows * descriptor.inner, PYRUNTIME_SIGNAL_ROWS) *
                          pieces(descriptor.width, PYRUNTIME_SIGNAL_COLUMNS));
}

bool DeviceTransport::sums_in_the_switch(const FlightDescriptor& descriptor) const {
  const c10::ScalarType dtype = descriptor.scalar_type();
  return multicast_ == Multicast::kGatherAndReduce && descriptor.op != Op::kMatmulReduceScatter &&
         dtype != c10::ScalarType::Double;
}

std::vector<int64_t> DeviceTransport::rows_held(const FlightDescriptor& descriptor) {
  const auto flight = gather(rows_held_descriptor(descriptor, world_size()));
  std::vector<int64_t> held = gather_rows_held(*flight, descriptor.own_rows, rank(), world_size());
  streams_.synchronize();
  raise_if_failed();  // before anybody believes these numbers
  return held;
}

}  // namespace pyruntime
