#include "transport/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <sstream>
#include <unistd.h>
#include <utility>

#include "core/arbiter.h"
#include "core/error.h"
#include "core/failure_board.h"
#include "core/store.h"
#include "cpu/host_process.h"
#include "transport/one_host.h"
#include "transport/one_host_device.h"
#include "transport/several_hosts_device.h"

namespace pyruntime {

namespace {

// Groups live exactly as long as torch's own registry of process groups, which is process-wide too.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Group>> groups;
};

Registry& registry() {
  static auto* instance = new Registry();  // never destroyed: tensors may outlive static destructors
  return *instance;
}

// A companion is called FIRST#CLASS after the group whose process group it shares and a class of traffic, or
// FIRST#CLASS:A>B where it is of the ranks A and B of that group alone.
constexpr char kCompanion = '#', kEdge = ':', kTo = '>';

std::string first_of(const std::string& name) {
  return name.substr(0, name.find(kCompanion));
}

// Of no other opening that this process is told of by any: the store keeps what was said under it, and a
// group may be made anew under its name.
std::string unique_name(const std::string& group) {
  static std::atomic<int> openings{0};
  return group + "/" + std::to_string(getpid()) + "." + std::to_string(++openings);
}

// Of the groups that share a process group each has another, below kGroupsOfOne.
constexpr int64_t kGroupsOfOne = 8;

int64_t number_of(const std::string& name) {
  const size_t at = name.find(kCompanion);
  if (at == std::string::npos) return 0;
  const std::string after = name.substr(at + 1);
  return 1 + static_cast<int64_t>(traffic_class_named(after.substr(0, after.find(kEdge))));
}

// Which of the process group's ranks the group of that name has.
std::vector<int> ranks_of(const std::string& name, int all) {
  const size_t at = name.find(kEdge, std::min(name.size(), name.find(kCompanion)));
  if (at == std::string::npos) {
    std::vector<int> ranks(all);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  const size_t to = name.find(kTo, at);
  return {std::stoi(name.substr(at + 1, to - at - 1)), std::stoi(name.substr(to + 1))};
}

}  // namespace

TransportKind transport_kind_named(const std::string& name) {
  if (name == "auto") return TransportKind::kAuto;
  if (name == "symmetric_memory") return TransportKind::kSymmetric;
  if (name == "hierarchical") return TransportKind::kHierarchical;
  if (name == "process_group") return TransportKind::kProcessGroup;
  if (name == "device") return TransportKind::kDevice;
  if (name == "collectives") return TransportKind::kCollectives;
  TORCH_CHECK_VALUE(false, "transport='", name,
                    "' is no transport; use 'auto', 'symmetric_memory', 'hierarchical', 'process_group', "
                    "'device' or 'collectives'.");
}

Group& Group::get(const std::string& name) {
  auto& [mutex, groups] = registry();
  const std::lock_guard<std::mutex> lock(mutex);
  auto process_group = c10d::resolve_process_group(first_of(name));
  auto& group = groups[name];
  // A name may come back with another process group after destroy_process_group().
  if (!group || &group->process_group() != process_group.get())
    group = std::make_unique<Group>(name, std::move(process_group));
  return *group;
}

void Group::close(const std::string& name) {
  auto& [mutex, groups] = registry();
  std::unique_ptr<Group> closing;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = groups.find(name);
    if (found == groups.end()) return;
    closing = std::move(found->second);
    groups.erase(found);
  }
  closing->free_workspaces();
}

void Group::leave_all() {
  std::vector<Transport*> open;
  {
    auto& [mutex, groups] = registry();
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto& [name, group] : groups) {
      if (group->transport_) open.push_back(group->transport_.get());
      for (auto& [device, found] : group->on_devices_) {
        if (found.transport) open.push_back(found.transport.get());
      }
    }
  }
  // Not under the lock: a wait takes the GIL now and then, whose holder may want the lock.
  for (Transport* transport : open) transport->leave();
}

std::map<TrafficClass, CommStats> Group::all_stats() {
  auto& [mutex, groups] = registry();
  const std::lock_guard<std::mutex> lock(mutex);
  std::map<TrafficClass, CommStats> result;
  for (const auto& [name, group] : groups) {
    CommStats& sum = result[group->context_.traffic_class];
    const CommStats& own = group->context_.stats;
    sum.ops += own.ops;
    sum.bytes += own.bytes;
    sum.waiting_s += own.waiting_s;
    sum.moving_s += own.moving_s;
  }
  return result;
}

Group::Group(std::string name, c10::intrusive_ptr<c10d::ProcessGroup> process_group)
    : process_group_(std::move(process_group)) {
  context_.name = std::move(name);
  ranks_ = ranks_of(context_.name, process_group_->getSize());
  const auto own = std::find(ranks_.begin(), ranks_.end(), process_group_->getRank());
  TORCH_CHECK(own != ranks_.end(), "Rank ", process_group_->getRank(), " is not one of '", context_.name,
              "'.");
  context_.rank = static_cast<int>(own - ranks_.begin());
  context_.world_size = static_cast<int>(ranks_.size());
  context_.told_ranks = ranks_;
  context_.deadline_seconds = kDefaultDeadlineSeconds;
  if (context_.world_size > 1) join_job();
}

Group::~Group() = default;

// All groups of a job stand on the same store, each below a prefix of its own. The rank in the job is the
// launcher's; without a launcher the job is this group.
void Group::join_job() {
  FailureBoard& board = FailureBoard::instance();
  auto store = process_group_->getStore();
  auto below = store;
  bool joined = board.has_joined(below);
  for (bool first = true; !joined; first = false) {
    const auto* prefixed = dynamic_cast<c10d::PrefixStore*>(below.get());
    if (prefixed == nullptr) break;
    below = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingStore();
    if (first) store = below;
    joined = board.has_joined(below);
  }
  const char* rank = std::getenv("RANK");
  const int own = rank == nullptr ? process_group_->getRank() : std::atoi(rank);
  if (!joined) board.join(std::move(store), own, process_group_->getSize());
  // Others know this rank by its number in the group, and its signs of life by that in the job.
  board.ask_later([key = key_of("member", this->rank()), number = std::to_string(own)](c10d::Store& asked) {
    asked.set(key, std::vector<uint8_t>(number.begin(), number.end()));
  });
}

std::string Group::key_of(const std::string& topic, int rank) const {
  return "pyruntime/" + topic + "/" + name() + "/" + std::to_string(rank);
}

Peer Group::peer_of(int rank) {
  Peer peer{-1, "rank " + std::to_string(context_.told(rank))};
  const auto known = job_ranks_.find(rank);
  if (known != job_ranks_.end()) {
    peer.rank = known->second;
    return peer;
  }
  auto found = std::make_shared<std::string>();
  const auto asked = FailureBoard::instance().ask(
      [found, key = key_of("member", rank)](c10d::Store& store) {
        if (!store.check({key})) return;
        const auto bytes = store.get(key);
        found->assign(bytes.begin(), bytes.end());
      },
      deadline_seconds());
  if (asked == FailureBoard::Asked::kAnswered && !found->empty()) {
    peer.rank = job_ranks_[rank] = std::stoi(*found);
  }
  return peer;
}

void Group::tell(const std::string& topic, const std::string& value) {
  pyruntime::tell(
      key_of(topic, rank()), value,
      {"Group '" + name() + "', rank " + std::to_string(context_.own_rank()), name(), deadline_seconds()});
}

int64_t Group::next_meeting() {
  return count(
      key_of("meetings", rank()),
      {"Group '" + name() + "', rank " + std::to_string(context_.own_rank()), name(), deadline_seconds()});
}

std::string Group::hear(int peer, const std::string& topic, const std::string& doing, double seconds,
                        bool while_it_lives) {
  return pyruntime::hear(key_of(topic, peer), [this, peer] { return peer_of(peer); },
                         {doing + ", rank " + std::to_string(context_.own_rank()) + " waiting for rank " +
                              std::to_string(context_.told(peer)),
                          name(), seconds, while_it_lives});
}

void Group::raise_for_missing(const std::string& doing, const std::string& cause) {
  std::vector<Peer> peers;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) peers.push_back(peer_of(peer));
  }
  pyruntime::raise_for_missing(
      peers, {doing + ", rank " + std::to_string(context_.own_rank()), name(), deadline_seconds()}, cause);
}

Transport* Group::transport(c10::Device device) {
  if (!device.is_cpu()) return device_transport(device);
  if (!transport_sought_) open_transport();
  return transport_.get();
}

c10::Device Group::known_device(c10::Device device) const {
  if (device.is_cpu() || device.has_index()) return device;
  for (const auto& [known, found] : on_devices_) {
    if (known.type() == device.type()) return known;
  }
  return device;
}

bool Group::crosses_hosts(c10::Device device) {
  if (world_size() == 1) return false;
  const Transport* found = transport(device);
  return found != nullptr && found->crosses_hosts();
}

std::string Group::why_no_transport(c10::Device device) const {
  if (device.is_cpu()) return why_no_transport_;
  const auto found = on_devices_.find(device);
  return found == on_devices_.end() ? "" : found->second.why_none;
}

Transport* Group::device_transport(c10::Device device) {
  const auto found = on_devices_.find(device);
  if (found != on_devices_.end()) return found->second.transport.get();
  const auto [opening, hosts] = begin_opening();
  OnDevice made;
  if (settings_.transport == TransportKind::kCollectives) {
    made.why_none = "transport='collectives' was asked for";
  } else {
    made.transport = open_device_transport(device, HostLayout(hosts, rank()).hosts(), opening);
    made.why_none = why_no_transport_;
  }
  return on_devices_.emplace(device, std::move(made)).first->second.transport.get();
}

std::unique_ptr<Transport> Group::open_device_transport(c10::Device device, int hosts, int64_t opening) {
  std::string why_no_library;
  const DeviceLibrary* library = DeviceLibrary::find(device.type(), why_no_library);
  check_multicast_can_be(hosts > 1 ? "its ranks are on " + std::to_string(hosts) + " hosts" : "");
  if (settings_.multicast != Multicast::kOff) {
    // On all ranks: who cannot must not leave the others waiting for its memory.
    const std::string own = library == nullptr ? why_no_library : why_no_multicast(device, *library);
    const std::string can = "can";
    int rank = 0;
    for (const std::string& found :
         exchange("multicast/" + std::to_string(opening), own.empty() ? can : own)) {
      check_multicast_can_be(found == can ? "" : "rank " + std::to_string(rank) + " cannot: " + found);
      ++rank;
    }
  }
  if (hosts > 1) {
    return make_several_hosts_device_transport(context_, process_group_, ranks_, device, hosts,
                                               instance_of(opening), library, why_no_transport_);
  }
  if (library == nullptr) {
    why_no_transport_ = why_no_library;
    return nullptr;
  }
  return make_device_transport(context_, workspace_group(), device, *library, settings_.ring.chunk_bytes,
                               settings_.multicast);
}

void Group::check_multicast_can_be(const std::string& why_not) const {
  TORCH_CHECK_VALUE(settings_.multicast == Multicast::kOff || why_not.empty(), "multicast='",
                    name_of(settings_.multicast), "' was asked for group '", name(), "', and ", why_not,
                    "; it is for the devices of one host with the kernels built. Leave multicast out.");
}

std::string Group::transport_description() const {
  for (const auto& [device, found] : on_devices_) {
    if (found.transport) return found.transport->description();
  }
  return transport_ ? transport_->description() : why_no_transport_;
}

void Group::configure(GroupSettings settings) {
  TORCH_CHECK(!transport_ && on_devices_.empty(), "Group '", name(),
              "' has already run ops; choose its transport before the first op, or after closing it.");
  TORCH_CHECK_VALUE(settings.hosts.empty() || static_cast<int>(settings.hosts.size()) == world_size(),
                    "hosts names ", settings.hosts.size(), " ranks' hosts and group '", name(), "' has ",
                    world_size(), " ranks; name one for each rank.");
  TORCH_CHECK_VALUE(
      settings.multicast == Multicast::kOff || settings.transport != TransportKind::kCollectives,
      "multicast='", name_of(settings.multicast), "' was asked for group '", name(),
      "' with transport='collectives', which leaves all to the process group; leave one of them out.");
  settings_ = std::move(settings);
  transport_sought_ = false;
}

void Group::follow(const Group& other) {
  context_.deadline_seconds = other.context_.deadline_seconds;
  GroupSettings settings = other.settings_;
  if (ranks_ != other.ranks_) {
    // What was asked for all ranks may not be possible among some: a host may have one of them.
    if (settings.transport == TransportKind::kHierarchical) settings.transport = TransportKind::kAuto;
    if (!settings.hosts.empty()) {
      settings.hosts.clear();
      for (const int rank : ranks_) settings.hosts.push_back(other.settings_.hosts.at(rank));
    }
  }
  if (settings_ == settings) return;
  free_workspaces();
  settings_ = std::move(settings);
}

void Group::free_workspaces() {
  if (transport_) transport_->flush();
  transport_.reset();
  for (auto& [device, found] : on_devices_) {
    if (found.transport) found.transport->flush();
  }
  on_devices_.clear();
  tier_trials_.clear();
  tuned_chunks_.clear();
  transport_sought_ = false;
  why_no_transport_.clear();
  // A rank that is not in the group that failed follows its job when it closes any group.
  FailureBoard::instance().clear([this](const std::string& failed) {
    // Of this group, or of a companion, which some of its ranks may not have.
    if (failed == name() || first_of(failed) == name()) return true;
    try {
      c10d::resolve_process_group(first_of(failed));
      return false;
    } catch (const c10::Error&) {
      return true;
    }
  });
}

void Group::open_transport() {
  TORCH_CHECK(!context_.link_is_broken, "Group '", name(),
              "' cannot be opened again: its connections still hold parts of an op that failed; make the "
              "process group anew (torch.distributed.destroy_process_group, or a restart of the job).");
  const auto [opening, hosts] = begin_opening();
  if (settings_.transport == TransportKind::kCollectives) {
    why_no_transport_ = "transport='collectives' was asked for";
    transport_sought_ = true;
    return;
  }
  const HostLayout by_host(hosts, rank());
  const TransportKind asked = settings_.transport;
  check_multicast_can_be(asked == TransportKind::kDevice ? "" : "an op has tensors on the CPU");
  const bool one_host = by_host.hosts() == 1;
  const bool can_be_hierarchical = !one_host && by_host.even() && by_host.ranks_per_host() > 1;
  TORCH_CHECK_VALUE(asked != TransportKind::kSymmetric || one_host,
                    "transport='symmetric_memory' was asked for group '", name(), "', whose ranks are on ",
                    by_host.hosts(), " hosts; use 'auto' or 'process_group'.");
  TORCH_CHECK_VALUE(asked != TransportKind::kHierarchical || can_be_hierarchical,
                    "transport='hierarchical' was asked for group '", name(), "', whose ", world_size(),
                    " ranks are on ", by_host.hosts(),
                    " host(s); it needs several hosts with the same number of ranks, more than one.");
  if (asked == TransportKind::kDevice) {
    transport_ = open_device_transport(c10::kCPU, by_host.hosts(), opening);
  } else if (one_host && asked != TransportKind::kProcessGroup) {
    transport_ = make_one_host_transport(context_, workspace_group());
  } else if (can_be_hierarchical && asked != TransportKind::kProcessGroup) {
    transport_ = make_ring(by_host, hosts, opening);
  } else {
    transport_ = make_ring(HostLayout::one_rank_each(world_size(), rank()), hosts, opening);
  }
  transport_sought_ = true;
}

std::pair<int64_t, std::vector<std::string>> Group::begin_opening() {
  // Counted in the store: a group may be closed and opened again, and its ranks must know which opening a
  // peer's message belongs to.
  const int64_t opening =
      process_group_->getStore()->add("pyruntime/opened/" + name() + "/" + std::to_string(rank()), 1);
  return {opening, meet(opening)};
}

std::vector<std::string> Group::meet(int64_t opening) {
  std::ostringstream own;
  own << "transport " << static_cast<int>(settings_.transport)
      << ", multicast=" << name_of(settings_.multicast) << ", chunk_bytes=" << settings_.ring.chunk_bytes
      << ", wire_dtype="
      << (settings_.ring.wire == c10::ScalarType::Undefined ? "None" : c10::toString(settings_.ring.wire))
      << ", hosts=[";
  for (const std::string& host : settings_.hosts) own << host << " ";
  own << "]";
  const std::string settled = own.str();
  constexpr char kSeparator = '\x1f';
  std::vector<std::string> hosts;
  for (const std::string& theirs :
       exchange("host/" + std::to_string(opening),
                settled + kSeparator + cpu::host_identity() + kSeparator + unique_name(name()))) {
    const size_t end = theirs.find(kSeparator);
    const size_t last = theirs.rfind(kSeparator);
    if (hosts.empty()) workspaces_ = theirs.substr(last + 1);
    TORCH_CHECK_VALUE(theirs.substr(0, end) == settled, "The ranks of group '", name(),
                      "' were configured differently: rank ", rank(), " with ", settled, " and rank ",
                      hosts.size(), " with ", theirs.substr(0, end),
                      "; call pyruntime.comm.configure alike on all ranks.");
    hosts.push_back(theirs.substr(end + 1, last - end - 1));
  }
  return settings_.hosts.empty() ? hosts : settings_.hosts;
}

int Group::instance_of(int64_t opening) const {
  return static_cast<int>((opening * kGroupsOfOne + number_of(name())) % (int64_t{1} << 30));
}

std::unique_ptr<WorkspaceGroup> Group::workspace_group() const {
  return std::make_unique<WorkspaceGroup>(workspaces_, rank(), world_size(), process_group_->getStore());
}

std::unique_ptr<Transport> Group::make_ring(const HostLayout& layout, const std::vector<std::string>& hosts,
                                            int64_t opening) {
  auto link = make_process_group_link(process_group_, ranks_);
  if (!link) {
    why_no_transport_ = "its process group has no backend for CPU tensors";
    return nullptr;
  }
  const std::string topic = "ring/" + name() + "/" + std::to_string(opening) + "/";
  std::vector<std::string> names;
  for (int host = 0; host < layout.hosts(); ++host) names.push_back(hosts[layout.ranks_of(host).front()]);

  const int flags = ring_flags(world_size(), layout.hosts());
  std::unique_ptr<HostWorkspace> workspace;
  if (layout.ranks_per_host() == 1) {
    workspace = make_private_workspace(context_, flags);
  } else {
    auto of_the_host = std::make_unique<WorkspaceGroup>(workspaces_ + "/host" + std::to_string(layout.host()),
                                                        layout.local_rank(), layout.ranks_per_host(),
                                                        process_group_->getStore());
    workspace = make_symmetric_workspace(context_, std::move(of_the_host), layout.ranks_of(layout.host()),
                                         layout.local_rank(), flags);
  }
  auto lines = connect_control_lines(*process_group_->getStore(), "pyruntime/" + topic + "line/", context_,
                                     ring_neighbours(layout));
  int round = 0;
  const auto agree = [&](const std::vector<double>& own) {
    std::string text;
    for (const double value : own) text += std::to_string(value * 1e12) + " ";
    // Of the texts alone, this rank's own too: all must come to the same number to the last bit.
    std::vector<double> largest(own.size(), 0.0);
    for (const std::string& theirs : exchange(topic + "cost/" + std::to_string(round++), text)) {
      std::istringstream values(theirs);
      for (double& value : largest) {
        double other = 0;
        values >> other;
        value = std::max(value, other * 1e-12);
      }
    }
    return largest;
  };
  return make_ring_transport(context_,
                             {layout, names, std::move(workspace), std::move(link), std::move(lines),
                              &Arbiter::instance(), instance_of(opening)},
                             settings_.ring, agree);
}

std::vector<std::string> Group::exchange(const std::string& topic, const std::string& own) {
  tell(topic, own);
  std::vector<std::string> all;
  for (int peer = 0; peer < world_size(); ++peer) {
    all.push_back(peer == rank() ? own
                                 : hear(peer, topic, "The first op of group '" + name() + "'",
                                        deadline_seconds(), /*while_it_lives=*/false));
  }
  return all;
}

int64_t Group::workspace_bytes() const {
  int64_t total = transport_ ? transport_->workspace_bytes() : 0;
  for (const auto& [device, found] : on_devices_) {
    if (found.transport) total += found.transport->workspace_bytes();
  }
  return total;
}

}  // namespace pyruntime
