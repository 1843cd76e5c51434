#include "cpu/symmetric_memory.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/host_process.h"
#include "core/job/failure_board.h"
#include "core/job/job_ranks.h"
#include "core/job/store.h"

namespace pyruntime::cpu {

namespace {

namespace symm = c10d::symmetric_memory;

constexpr double kEndingSeconds = 1.0;  // within which a dying process is gone
constexpr uint64_t kMagic = 0x7079727553594d4dull;
constexpr size_t kHugePage = size_t{2} << 20;

std::atomic<double> deadline_seconds{kDefaultDeadlineSeconds};
std::atomic<size_t> allocated_bytes{0};

double seconds_of(size_t timeout_ms) {
  return timeout_ms == 0 ? deadline_seconds.load() : static_cast<double>(timeout_ms) * 1e-3;
}

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The first page of every segment. It is shared, so every field that changes is atomic.
struct SegmentHeader {
  uint64_t magic;
  std::atomic<uint32_t> freed;  // the owner has freed its tensor
  std::atomic<uint32_t>
      peers_mapped;  // peers that have opened this segment; the owner's rendezvous waits for all of them
};

// One mapped memfd. The mapping outlives the owner's tensor while any rank has a handle on it.
class Segment {
 public:
  // Allocates a segment of this process.
  static std::shared_ptr<Segment> create(size_t buffer_bytes, size_t signal_bytes) {
    UniqueFd fd(memfd_create("pyruntime-symmetric-memory", MFD_CLOEXEC));
    TORCH_CHECK(fd.valid(), "memfd_create failed (", std::strerror(errno),
                "): symmetric memory needs Linux 3.17 or newer.");
    auto segment = std::shared_ptr<Segment>(new Segment(std::move(fd), buffer_bytes, signal_bytes));
    TORCH_CHECK(ftruncate(segment->fd_.get(), static_cast<off_t>(segment->mapped_bytes())) == 0,
                "Cannot reserve ", buffer_bytes, " bytes of symmetric memory: ", std::strerror(errno), ".");
    segment->map();
    new (segment->base_) SegmentHeader{kMagic, {0}, {0}};
    return segment;
  }

  // Maps a peer's segment.
  static std::shared_ptr<Segment> open_peer(const std::string& peer, pid_t pid, int peer_fd,
                                            size_t buffer_bytes, size_t signal_bytes) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(peer_fd);
    UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
    const int cause = errno;
    if (!fd.valid()) {
      // A dying process loses its descriptors before it is gone.
      const auto ended = [&] { return WatchedProcess(pid).gone(); };
      if (wait_until(ended, kEndingSeconds, [] {})) {
        raise_comm_error(CommErrorKind::kPeerLost,
                         "rendezvous: " + peer + " ended before its memory was opened.");
      }
      errno = cause;
    }
    TORCH_CHECK(fd.valid(), "rendezvous: cannot open the symmetric memory of ", peer, " at ", path, " (",
                std::strerror(errno),
                "); all ranks must run as the same user, in one process-id namespace, with /proc mounted.");
    auto segment = std::shared_ptr<Segment>(new Segment(std::move(fd), buffer_bytes, signal_bytes));
    struct stat status{};
    TORCH_CHECK(
        fstat(segment->fd(), &status) == 0 && status.st_size == static_cast<off_t>(segment->mapped_bytes()),
        "rendezvous: ", path, " of ", peer, " has another size than it announced; has the rank restarted?");
    segment->map();
    TORCH_CHECK(segment->header().magic == kMagic, "rendezvous: ", path, " of ", peer,
                " is not symmetric memory.");
    segment->header().peers_mapped.fetch_add(1, std::memory_order_release);
    return segment;
  }

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    if (base_ != nullptr) munmap(base_, mapped_bytes());
  }

  SegmentHeader& header() const { return *static_cast<SegmentHeader*>(base_); }
  void* signal_pad() const { return static_cast<char*>(base_) + page_bytes(); }
  void* buffer() const { return static_cast<char*>(base_) + buffer_offset(); }
  size_t buffer_bytes() const { return buffer_bytes_; }
  size_t signal_bytes() const { return signal_bytes_; }
  size_t mapped_bytes() const { return buffer_offset() + round_up(buffer_bytes_, page_bytes()); }
  int fd() const { return fd_.get(); }

 private:
  Segment(UniqueFd fd, size_t buffer_bytes, size_t signal_bytes)
      : fd_(std::move(fd)), buffer_bytes_(buffer_bytes), signal_bytes_(signal_bytes) {}

  // Large buffers start on a huge-page boundary of the file. Skipped pages are never touched and cost
  // nothing.
  size_t buffer_offset() const {
    const size_t end = page_bytes() + round_up(signal_bytes_, page_bytes());
    return buffer_bytes_ >= kHugePage ? round_up(end, kHugePage) : end;
  }

  void map() {
    void* address = mmap(nullptr, mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    TORCH_CHECK(address != MAP_FAILED, "Cannot map ", mapped_bytes(),
                " bytes of symmetric memory: ", std::strerror(errno), ".");
    base_ = address;
    // Causes fewer TLB misses if the kernel grants huge pages to shared memory, and costs nothing if not.
    if (buffer_bytes_ >= kHugePage) madvise(buffer(), buffer_bytes_, MADV_HUGEPAGE);
  }

  UniqueFd fd_;
  size_t buffer_bytes_;
  size_t signal_bytes_;
  void* base_ = nullptr;
};

// A rank's description of its segment, which its peers read in the group's store.
struct Invitation {
  std::string host;
  pid_t pid;
  int fd;
  size_t buffer_bytes;
  size_t signal_bytes;

  std::string encode() const {
    std::ostringstream text;
    text << pid << ' ' << fd << ' ' << buffer_bytes << ' ' << signal_bytes << ' ' << host;
    return text.str();
  }
  static Invitation decode(const std::string& encoded) {
    Invitation invitation;
    std::istringstream text(encoded);
    text >> invitation.pid >> invitation.fd >> invitation.buffer_bytes >> invitation.signal_bytes >> std::ws;
    std::getline(text, invitation.host);
    TORCH_CHECK(!text.fail(), "rendezvous: unreadable invitation '", encoded, "' in the group's store.");
    return invitation;
  }
};

std::string name_of(int job_rank) {
  return JobRanks::instance().name_and_place(job_rank);
}

class CpuSymmetricMemory : public symm::SymmetricMemory {
 public:
  CpuSymmetricMemory(std::string group_name, int rank, std::vector<int> job_ranks,
                     std::vector<std::shared_ptr<Segment>> segments, std::vector<WatchedProcess> processes)
      : group_name_(std::move(group_name)),
        rank_(rank),
        job_ranks_(std::move(job_ranks)),
        segments_(std::move(segments)),
        processes_(std::move(processes)) {
    for (const auto& segment : segments_) {
      buffers_.push_back(segment->buffer());
      signal_pads_.push_back(segment->signal_pad());
    }
  }

  std::vector<void*> get_buffer_ptrs() override {
    check_alive("get_buffer");
    return buffers_;
  }
  std::vector<void*> get_signal_pad_ptrs() override {
    check_alive("get_signal_pad");
    return signal_pads_;
  }
  void** get_buffer_ptrs_dev() override {
    check_alive("get_buffer");
    return buffers_.data();
  }
  void** get_signal_pad_ptrs_dev() override {
    check_alive("get_signal_pad");
    return signal_pads_.data();
  }
  size_t get_buffer_size() override { return segments_[rank_]->buffer_bytes(); }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(segments_.size()); }
  c10::Device get_device() override { return {c10::kCPU}; }
  bool world_within_direct_access() override { return true; }

  // A signal is one word of the receiver's pad: put_signal waits for 0 and sets 1, wait_signal waits for 1
  // and sets 0. The pad is therefore zero again after every pair, as torch's contract asks.
  void put_signal(int peer, int channel, size_t timeout_ms) override {
    check_alive("put_signal");
    check_peer(peer);
    exchange("put_signal", peer, slot(signal_pads_[peer], channel, rank_), channel, 0, 1, timeout_ms);
  }

  void wait_signal(int peer, int channel, size_t timeout_ms) override {
    check_alive("wait_signal");
    check_peer(peer);
    exchange("wait_signal", peer, slot(signal_pads_[rank_], channel, peer), channel, 1, 0, timeout_ms);
  }

  void barrier(int channel, size_t timeout_ms) override {
    check_alive("barrier");
    for (int peer = 0; peer < get_world_size(); ++peer) {
      if (peer != rank_)
        exchange("barrier", peer, slot(signal_pads_[peer], channel, rank_), channel, 0, 1, timeout_ms);
    }
    for (int peer = 0; peer < get_world_size(); ++peer) {
      if (peer != rank_)
        exchange("barrier", peer, slot(signal_pads_[rank_], channel, peer), channel, 1, 0, timeout_ms);
    }
  }

 private:
  using Word = std::atomic<uint32_t>;

  void check_alive(const char* what) const {
    for (size_t rank = 0; rank < segments_.size(); ++rank) {
      TORCH_CHECK(segments_[rank]->header().freed.load(std::memory_order_acquire) == 0, what,
                  " on symmetric memory of group '", group_name_, "': the tensor of ",
                  name_of(job_ranks_[rank]),
                  " has been freed; keep the tensor of every rank alive for as long as its handle is used.");
    }
  }

  void check_peer(int peer) const {
    TORCH_CHECK_VALUE(peer >= 0 && peer < static_cast<int>(segments_.size()), "rank ", peer,
                      " is not in group '", group_name_, "' of ", segments_.size(), " ranks.");
  }

  Word& slot(void* pad, int channel, int source) const {
    const size_t index = segments_.size() * channel + source;
    TORCH_CHECK_VALUE(channel >= 0 && (index + 1) * sizeof(Word) <= segments_[rank_]->signal_bytes(),
                      "channel ", channel, " does not fit in the signal pad of ",
                      segments_[rank_]->signal_bytes(), " bytes at ", segments_.size(),
                      " ranks; use a smaller channel, or set_signal_pad_size() before allocating.");
    return static_cast<Word*>(pad)[index];
  }

  void exchange(const char* what, int peer, Word& word, int channel, uint32_t from, uint32_t to,
                size_t timeout_ms) const {
    const double seconds = seconds_of(timeout_ms);
    const auto site = [&] {
      std::ostringstream text;
      text << what << " on group '" << group_name_ << "', " << name_of(job_ranks_[rank_]) << ", peer "
           << name_of(job_ranks_[peer]) << ", channel " << channel;
      return text.str();
    };
    const auto try_exchange = [&] {
      uint32_t expected = from;
      // acq_rel: whoever takes the signal sees all writes before it.
      return word.compare_exchange_strong(expected, to, std::memory_order_acq_rel);
    };
    const auto peer_lives = [&] {
      if (processes_[peer].gone()) {
        raise_comm_error(CommErrorKind::kPeerLost, site() + ": the peer's process has ended.");
      }
    };
    if (!wait_until(try_exchange, seconds, peer_lives)) {
      raise_comm_error(CommErrorKind::kTimeout, site() + ": no answer within " + std::to_string(seconds) +
                                                    " s (expected " + std::to_string(from) + ", seen " +
                                                    std::to_string(word.load()) + ").");
    }
  }

  std::string group_name_;
  int rank_;
  std::vector<int> job_ranks_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<WatchedProcess> processes_;
  std::vector<void*> buffers_;
  std::vector<void*> signal_pads_;
};

// Returns ask(), which reads the job's store; raises PeerLost if the store is gone.
template <typename Ask>
auto with_store(const std::string& site, const Ask& ask) {
  try {
    return ask();
  } catch (const c10::DistError&) {
    FailureBoard& board = FailureBoard::instance();
    board.raise_if_failed();
    raise_comm_error(CommErrorKind::kPeerLost, site + board.words_of_lost_store());
  }
}

// Finds a group as torch's symmetric memory for CUDA does: only among process groups, not by
// set_group_info().
symm::GroupInfo group_named(const std::string& name) {
  const auto group = c10d::resolve_process_group(name);
  return {group->getRank(), group->getSize(), group->getStore()};
}

class CpuSymmetricMemoryAllocator : public symm::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int /*device_idx*/, const std::optional<std::string>& /*group_name*/) override {
    auto segment = Segment::create(size, symm::get_signal_pad_size());
    void* pointer = segment->buffer();
    const std::lock_guard<std::mutex> lock(mutex_);
    allocated_bytes += size;
    allocations_[pointer] = Allocation{std::move(segment), getpid(), "", nullptr};
    return pointer;
  }

  void free(void* pointer) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = allocations_.find(pointer);
    if (found == allocations_.end()) return;
    // A forked child frees only its copies; the memory is its parent's.
    if (found->second.owner == getpid())
      found->second.segment->header().freed.store(1, std::memory_order_release);
    allocated_bytes -= found->second.segment->buffer_bytes();
    allocations_.erase(found);
  }

  size_t get_alloc_size(void* pointer) override { return find(pointer).segment->buffer_bytes(); }

  c10::intrusive_ptr<symm::SymmetricMemory> rendezvous(
      void* pointer, const std::optional<std::string>& group_name) override {
    TORCH_CHECK_VALUE(group_name.has_value(),
                      "rendezvous of CPU symmetric memory needs the name of a group.");
    std::shared_ptr<Segment> segment;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const Allocation& allocation = find(pointer);
      if (allocation.handle) {
        // The same group gets the same handle again, as torch promises. Another group would share the signal
        // pad, where its signals could not be told from the first group's.
        TORCH_CHECK(allocation.group_name == *group_name,
                    "double rendezvous: this tensor is already symmetric memory of group '",
                    allocation.group_name, "' and cannot join group '", *group_name,
                    "' too; allocate a second tensor for it.");
        return allocation.handle;
      }
      segment = allocation.segment;
    }
    // Not under the lock: a rendezvous takes time, and a tensor may be freed meanwhile.
    auto handle = meet(segment, *group_name);
    const std::lock_guard<std::mutex> lock(mutex_);
    Allocation& allocation = find(pointer);
    allocation.handle = handle;
    allocation.group_name = *group_name;
    return handle;
  }

  bool has_multicast_support(int /*device_idx*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "CPU"; }
  // No `override`: torch 2.11 does not declare it.
  // NOLINTNEXTLINE
  bool has_allocation(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocations_.count(pointer) != 0;
  }

 private:
  struct Allocation {
    std::shared_ptr<Segment> segment;
    pid_t owner;
    std::string group_name;
    c10::intrusive_ptr<symm::SymmetricMemory> handle;
  };

  Allocation& find(void* pointer) {
    const auto found = allocations_.find(pointer);
    TORCH_CHECK(found != allocations_.end(),
                "This pointer is not the start of live CPU symmetric memory; allocate it with "
                "torch.distributed._symmetric_memory.empty().");
    return found->second;
  }

  // Exchanges invitations through the group's store, opens every peer's segment, and waits until all peers
  // have opened this rank's. Until then its descriptor must stay open.
  c10::intrusive_ptr<symm::SymmetricMemory> meet(const std::shared_ptr<Segment>& segment,
                                                 const std::string& group_name) {
    const symm::GroupInfo group = group_named(group_name);
    const double seconds = deadline_seconds;
    const std::string topic = "pyruntime/symmetric_memory/" + group_name + "/";
    // Rendezvous are counted in the store, which belongs to the group; a count kept here would outlive the
    // group.
    const std::vector<int> job_ranks = JobRanks::instance().of(group_name, group.world_size);
    const std::string site =
        "rendezvous on group '" + group_name + "', " + name_of(job_ranks[group.rank]) + ": ";
    const int64_t before = with_store(
        site, [&] { return group.store->add(topic + "rounds of " + std::to_string(group.rank), 1) - 1; });
    const std::string round = topic + std::to_string(before) + "/";
    const Invitation own{host_identity(), getpid(), segment->fd(), segment->buffer_bytes(),
                         segment->signal_bytes()};
    const std::string text = own.encode();
    with_store(site, [&] {
      group.store->set(round + std::to_string(group.rank), std::vector<uint8_t>(text.begin(), text.end()));
    });
    std::vector<Invitation> invitations;
    for (int peer = 0; peer < group.world_size; ++peer) {
      const Invitation from = peer == group.rank ? own : with_store(site, [&] {
        return receive(group, site + name_of(job_ranks[peer]), round, peer, seconds);
      });
      if (from.host == own.host) JobRanks::instance().learn(job_ranks[peer], host_name(), from.pid);
      invitations.push_back(from);
    }
    check_agreement(invitations, site, job_ranks, group.rank);

    std::vector<std::shared_ptr<Segment>> segments;
    std::vector<WatchedProcess> processes;
    for (int peer = 0; peer < group.world_size; ++peer) {
      const Invitation& from = invitations[peer];
      const bool is_own = peer == group.rank;
      segments.push_back(is_own ? segment
                                : Segment::open_peer(name_of(job_ranks[peer]), from.pid, from.fd,
                                                     from.buffer_bytes, from.signal_bytes));
      processes.push_back(is_own ? WatchedProcess() : WatchedProcess(from.pid));
    }
    await_peers(*segment, processes, site, job_ranks, seconds);
    return c10::make_intrusive<CpuSymmetricMemory>(group_name, group.rank, job_ranks, std::move(segments),
                                                   std::move(processes));
  }

  static Invitation receive(const symm::GroupInfo& group, const std::string& who, const std::string& round,
                            int peer, double seconds) {
    const std::string key = round + std::to_string(peer);
    if (!await_key(*group.store, key, seconds)) {
      raise_comm_error(CommErrorKind::kTimeout,
                       who + " did not come within " + std::to_string(seconds) +
                           " s; all ranks must allocate and rendezvous in the same order.");
    }
    const std::vector<uint8_t> bytes = group.store->get(key);
    return Invitation::decode(std::string(bytes.begin(), bytes.end()));
  }

  static void check_agreement(const std::vector<Invitation>& invitations, const std::string& site,
                              const std::vector<int>& job_ranks, int rank) {
    const Invitation& own = invitations[rank];
    for (size_t peer = 0; peer < invitations.size(); ++peer) {
      const Invitation& other = invitations[peer];
      const std::string theirs = name_of(job_ranks[peer]), ours = name_of(job_ranks[rank]);
      TORCH_CHECK(
          other.host == own.host, site, theirs, " runs on another host or in another container than ", ours,
          "; symmetric memory on CPU reaches one host only, use the process-group transport across hosts.");
      TORCH_CHECK_VALUE(other.buffer_bytes == own.buffer_bytes, site, theirs, " brings ", other.buffer_bytes,
                        " bytes and ", ours, " brings ", own.buffer_bytes,
                        "; symmetric memory has the same size on every rank.");
      TORCH_CHECK_VALUE(other.signal_bytes == own.signal_bytes, site, "the signal pad of ", theirs, " has ",
                        other.signal_bytes, " bytes and that of ", ours, " has ", own.signal_bytes,
                        "; call set_signal_pad_size() with the same value on every rank.");
    }
  }

  static void await_peers(const Segment& own, const std::vector<WatchedProcess>& processes,
                          const std::string& site, const std::vector<int>& job_ranks, double seconds) {
    const uint32_t expected = static_cast<uint32_t>(processes.size()) - 1;
    const auto all_mapped = [&] {
      return own.header().peers_mapped.load(std::memory_order_acquire) >= expected;
    };
    const auto peers_live = [&] {
      for (size_t peer = 0; peer < processes.size(); ++peer) {
        if (processes[peer].gone()) {
          raise_comm_error(CommErrorKind::kPeerLost, site + name_of(job_ranks[peer]) + " has ended.");
        }
      }
    };
    if (!wait_until(all_mapped, seconds, peers_live)) {
      raise_comm_error(CommErrorKind::kTimeout, site + std::to_string(own.header().peers_mapped.load()) +
                                                    " of " + std::to_string(expected) +
                                                    " peers opened this rank's memory within " +
                                                    std::to_string(seconds) + " s.");
    }
  }

  std::mutex mutex_;
  std::map<void*, Allocation> allocations_;
};

}  // namespace

void register_symmetric_memory() {
  symm::register_allocator(c10::kCPU, c10::make_intrusive<CpuSymmetricMemoryAllocator>());
}

double symmetric_memory_deadline() {
  return deadline_seconds;
}

void set_symmetric_memory_deadline(double seconds) {
  deadline_seconds = seconds;
}

size_t symmetric_memory_bytes() {
  return allocated_bytes;
}

}  // namespace pyruntime::cpu
