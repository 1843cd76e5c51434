#include "transport/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/deadline.h"
#include "core/job/failure_board.h"

namespace pyruntime {

namespace {

// The groups of this process, by name. They live exactly as long as torch's own registry of process groups,
// which is process-wide too.
struct Registry {
  std::mutex mutex;
  std::map<std::string, GroupKey> companions;
  std::map<std::string, std::unique_ptr<Group>> groups;
};

Registry& registry() {
  static auto* instance = new Registry();  // never destroyed: tensors may outlive static destructors
  return *instance;
}

std::function<void(const std::string&)>& new_group_hook() {
  static auto* hook = new std::function<void(const std::string&)>();
  return *hook;
}

// The process group's ranks that are in the group, in the group's order.
std::vector<int> ranks_of(const GroupKey& key, int all) {
  if (key.edge) return {key.edge->first, key.edge->second};
  std::vector<int> ranks(all);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

GroupContext context_of(const GroupKey& key, const std::vector<int>& job_ranks, int own) {
  GroupContext context{};
  context.name = key.name();
  context.process_group = key.process_group;
  context.process_group_ranks = ranks_of(key, static_cast<int>(job_ranks.size()));
  for (const int rank : context.process_group_ranks) context.job_ranks.push_back(job_ranks.at(rank));
  const auto place = std::find(context.process_group_ranks.begin(), context.process_group_ranks.end(), own);
  TORCH_CHECK(place != context.process_group_ranks.end(), JobRanks::instance().name(job_ranks.at(own)),
              " is not one of '", context.name, "'.");
  context.rank = static_cast<int>(place - context.process_group_ranks.begin());
  context.world_size = static_cast<int>(context.process_group_ranks.size());
  context.deadline_seconds = kDefaultDeadlineSeconds;
  if (key.companion) context.traffic_class = *key.companion;
  context.within_class = key.within;
  return context;
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group_named(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "No process group has the name '", name,
                      "'. If there was one, its Runtime was closed or the group destroyed: use layers and "
                      "groups before that.");
  }
}

// Whether torch's registry still has it, and not another in its place.
bool is_registered(const std::string& name, const c10d::ProcessGroup* process_group = nullptr) {
  try {
    const auto registered = c10d::resolve_process_group(name);
    return process_group == nullptr || registered.get() == process_group;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

Group::Group(GroupKey key, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
             const std::vector<int>& job_ranks)
    : key_(std::move(key)),
      context_(context_of(key_, job_ranks, process_group->getRank())),
      rendezvous_(context_, process_group) {}

Transport& Group::transport(c10::Device device) {
  const std::lock_guard<std::mutex> lock(transports_mutex_);
  const auto found = transports_.find(device);
  if (found != transports_.end()) return *found->second;
  return *transports_.emplace(device, make_transport(device)).first->second;
}

c10::Device Group::known_device(c10::Device device) const {
  if (device.is_cpu() || device.has_index()) return device;
  for (const auto& [known, transport] : transports_) {
    if (known.type() == device.type()) return known;
  }
  return device;
}

bool Group::crosses_hosts(c10::Device device) {
  return world_size() > 1 && transport(device).crosses_hosts();
}

std::string Group::transport_description() const {
  // A device's transport whose rows travel in chunks says most; the CPU's comes first in the map.
  for (auto found = transports_.rbegin(); found != transports_.rend(); ++found) {
    if (found->second->why_not_chunked().empty()) return found->second->description();
  }
  return transports_.empty() ? "" : transports_.begin()->second->description();
}

void Group::configure(GroupSettings settings) {
  TORCH_CHECK(transports_.empty(), "Group '", name(),
              "' has already run ops; choose its transport before the first op, or after closing it.");
  TORCH_CHECK_VALUE(settings.hosts.empty() || static_cast<int>(settings.hosts.size()) == world_size(),
                    "hosts names ", settings.hosts.size(), " ranks' hosts and group '", name(), "' has ",
                    world_size(), " ranks; name one for each rank.");
  TORCH_CHECK_VALUE(
      settings.multicast == Multicast::kOff || settings.transport != TransportKind::kCollectives,
      "multicast='", name_of(settings.multicast), "' was asked for group '", name(),
      "' with transport='collectives', which leaves all to the process group; set only one of the two.");
  const std::string why_not = settings.rings.why_not(world_size());
  TORCH_CHECK_VALUE(why_not.empty(), "Group '", name(), "': ", why_not);
  TORCH_CHECK_VALUE(settings.rings.empty() || settings.multicast == Multicast::kOff, "rings and multicast='",
                    name_of(settings.multicast), "' were asked for group '", name(),
                    "', but rows for all ranks can take only one of these ways; set only one.");
  settings_ = std::move(settings);
}

void Group::take_settings(const Group& served) {
  context_.deadline_seconds = served.context_.deadline_seconds;
  context_.traffic_class = *key_.companion;
  GroupSettings settings =
      key_.edge ? served.settings_.among(context_.process_group_ranks) : served.settings_;
  if (settings_ == settings) return;
  free_workspaces();
  settings_ = std::move(settings);
}

void Group::free_workspaces() {
  for (const auto& [device, transport] : transports_) transport->flush();
  transports_.clear();
  context_.inside.contended = false;
  context_.passes = {};
  context_.failed_passes = 0;
  if (key_.companion) return;  // a companion's failure is reported as its process group's
  // A rank outside the failed group follows its job when it closes any group.
  FailureBoard::instance().clear(
      [this](const std::string& failed) { return failed == key_.process_group || !is_registered(failed); });
}

int64_t Group::workspace_bytes() const {
  int64_t total = 0;
  for (const auto& [device, transport] : transports_) total += transport->workspace_bytes();
  return total;
}

Group& Group::get(const std::string& name) {
  auto& [mutex, companions, groups] = registry();
  GroupKey key;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  const auto known = [&, &companions = companions, &groups = groups]() -> Group* {
    const auto companion = companions.find(name);
    key = companion == companions.end() ? GroupKey{name, {}, {}} : companion->second;
    process_group = process_group_named(key.process_group);
    const auto found = groups.find(name);
    // A name may come back with another process group after destroy_process_group().
    const bool is_it = found != groups.end() && &found->second->process_group() == process_group.get();
    return is_it ? found->second.get() : nullptr;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (Group* group = known()) return *group;
  }
  // Neither this nor the hook runs under the lock: they may want the GIL, whose holder may want the lock.
  const std::vector<int> job_ranks = JobRanks::instance().of(key.process_group, process_group->getSize());
  Group* group = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (Group* made = known()) return *made;  // another thread made it meanwhile
    group = (groups[name] = std::make_unique<Group>(key, process_group, job_ranks)).get();
  }
  if (!group->key_.companion && new_group_hook()) new_group_hook()(name);
  return *group;
}

void Group::on_new(std::function<void(const std::string&)> hook) {
  new_group_hook() = std::move(hook);
}

void Group::forget_destroyed() {
  auto& [mutex, companions, groups] = registry();
  std::vector<std::unique_ptr<Group>> destroyed;  // destroyed without the lock: their threads may want it
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto each = groups.begin(); each != groups.end();) {
    if (is_registered(each->second->key_.process_group, &each->second->process_group())) {
      ++each;
    } else {
      destroyed.push_back(std::move(each->second));
      each = groups.erase(each);
    }
  }
}

std::string Group::companion(const std::string& of, TrafficClass traffic_class,
                             std::optional<std::pair<int, int>> edge, int within) {
  TORCH_CHECK_VALUE(within >= -2 && within <= 3, "A companion was asked for at place ", within,
                    " within its class; use -2 to 3.");
  const GroupKey key{of, traffic_class, edge, within};
  const std::string name = key.name();
  {
    auto& [mutex, companions, groups] = registry();
    const std::lock_guard<std::mutex> lock(mutex);
    companions[name] = key;
  }
  get(name).take_settings(get(of));
  return name;
}

void Group::close(const std::string& name) {
  auto& [mutex, companions, groups] = registry();
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
    auto& [mutex, companions, groups] = registry();
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto& [name, group] : groups) {
      for (const auto& [device, transport] : group->transports_) open.push_back(transport.get());
    }
  }
  // Not under the lock: a wait takes the GIL now and then, whose holder may want the lock.
  for (Transport* transport : open) transport->leave();
}

std::map<TrafficClass, CommStats> Group::all_stats() {
  auto& [mutex, companions, groups] = registry();
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

}  // namespace pyruntime
