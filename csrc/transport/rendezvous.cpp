#include "transport/rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <sstream>
#include <unistd.h>
#include <utility>

#include "core/host_process.h"
#include "core/job/failure_board.h"

namespace pyruntime {

namespace {

// The prefix that torch's init_process_group puts before the keys of all groups.
constexpr char kOfAllGroups[] = "default_pg";

// torch shows a store's prefix only to derived classes.
struct Prefix : c10d::PrefixStore {
  static const std::string& of(const c10d::PrefixStore& store) { return store.*&Prefix::prefix_; }
};

// The store keeps values by name, and a group may be made again under its old name.
std::string unique_name(const std::string& group) {
  static std::atomic<int> names{0};
  return group + "/" + std::to_string(getpid()) + "." + std::to_string(++names);
}

}  // namespace

Rendezvous::Rendezvous(const GroupContext& context, c10::intrusive_ptr<c10d::ProcessGroup> process_group)
    : context_(context), process_group_(std::move(process_group)) {
  if (context.world_size > 1) join_job();
}

// All groups of a job use the same store, each below a prefix of its own. Ranks may open different groups
// first, so the choice of store must not depend on the group: it is the store on which torch makes all
// groups.
void Rendezvous::join_job() {
  FailureBoard& board = FailureBoard::instance();
  auto store = process_group_->getStore(), below = store;
  bool joined = board.has_joined(below);
  for (bool first = true; !joined; first = false) {
    const auto* prefixed = dynamic_cast<c10d::PrefixStore*>(below.get());
    if (prefixed == nullptr) break;
    if (Prefix::of(*prefixed) == kOfAllGroups) store = below;
    below = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingStore();
    if (first) store = below;
    joined = board.has_joined(below);
  }
  if (!joined) board.join(std::move(store), context_.job_rank(context_.rank), process_group_->getSize());
}

std::string Rendezvous::key_of(const std::string& topic, int rank) const {
  return "pyruntime/" + topic + "/" + context_.name + "/" + std::to_string(rank);
}

Waiting Rendezvous::waiting(const std::string& for_what) const {
  return {for_what + ", " + context_.own_name(), context_.process_group, context_.deadline_seconds};
}

void Rendezvous::tell(const std::string& topic, const std::string& value) {
  pyruntime::tell(key_of(topic, context_.rank), value, waiting("Group '" + context_.name + "'"));
}

int64_t Rendezvous::next_exchange() {
  return count(key_of("exchanges", context_.rank), waiting("Group '" + context_.name + "'"));
}

std::string Rendezvous::hear(int peer, const std::string& topic, const std::string& doing, double seconds,
                             bool while_it_lives) {
  Waiting peers = waiting(doing);
  peers.for_what += " waiting for " + context_.name_of(peer);
  peers.seconds = seconds;
  peers.while_it_lives = while_it_lives;
  return pyruntime::hear(key_of(topic, peer), context_.job_rank(peer), peers);
}

std::vector<std::string> Rendezvous::exchange(const std::string& topic, const std::string& own) {
  tell(topic, own);
  std::vector<std::string> all;
  for (int peer = 0; peer < context_.world_size; ++peer) {
    all.push_back(peer == context_.rank ? own
                                        : hear(peer, topic, "The first op of group '" + context_.name + "'",
                                               context_.deadline_seconds, /*while_it_lives=*/false));
  }
  return all;
}

std::vector<double> Rendezvous::agree(const std::string& topic, const std::vector<double>& own) {
  std::string text;
  for (const double value : own) text += std::to_string(value * 1e12) + " ";
  // Uses only the texts, this rank's own too: all must get the same number to the last bit.
  std::vector<double> largest(own.size(), 0.0);
  for (const std::string& theirs : exchange(topic, text)) {
    std::istringstream values(theirs);
    for (double& value : largest) {
      double other = 0;
      values >> other;
      value = std::max(value, other * 1e-12);
    }
  }
  return largest;
}

void Rendezvous::raise_for_missing(const std::string& doing, const std::string& cause) {
  std::vector<int> others;
  for (int peer = 0; peer < context_.world_size; ++peer) {
    if (peer != context_.rank) others.push_back(context_.job_rank(peer));
  }
  pyruntime::raise_for_missing(others, waiting(doing), cause);
}

Gathered Rendezvous::gather(const GroupSettings& settings) {
  constexpr char kSeparator = '\x1f';
  const std::string own = settings.text();
  Gathered gathered;
  // The store counts rendezvous: a group may be closed and used again, and its ranks must know to which
  // rendezvous a peer's message belongs.
  gathered.number = process_group_->getStore()->add(key_of("rendezvous", context_.rank), 1);
  for (const std::string& theirs :
       exchange("host/" + std::to_string(gathered.number),
                own + kSeparator + host_identity() + kSeparator + host_name() + kSeparator +
                    std::to_string(getpid()) + kSeparator + unique_name(context_.name))) {
    std::istringstream parts(theirs);
    std::string settled, host, host_named, pid, workspaces;
    for (std::string* part : {&settled, &host, &host_named, &pid, &workspaces}) {
      std::getline(parts, *part, kSeparator);
    }
    const auto peer = static_cast<int>(gathered.hosts.size());
    JobRanks::instance().learn(context_.job_rank(peer), host_named, std::stoi(pid));
    if (peer == 0) gathered.workspaces = workspaces;
    TORCH_CHECK_VALUE(settled == own, "The ranks of group '", context_.name,
                      "' were configured differently: ", context_.own_name(), " with ", own, " and ",
                      context_.name_of(peer), " with ", settled,
                      "; call pyruntime.comm.configure alike on all ranks.");
    gathered.hosts.push_back(host);
    gathered.pids.push_back(std::stoi(pid));
  }
  if (!settings.hosts.empty()) gathered.hosts = settings.hosts;
  return gathered;
}

std::unique_ptr<WorkspaceGroup> Rendezvous::workspace_group(const Gathered& gathered,
                                                            const HostLayout& layout) const {
  std::vector<int> job_ranks;
  for (const int rank : layout.ranks_of(layout.host())) job_ranks.push_back(context_.job_rank(rank));
  return std::make_unique<WorkspaceGroup>(gathered.workspaces + "/host" + std::to_string(layout.host()),
                                          layout.local_rank(), std::move(job_ranks),
                                          process_group_->getStore());
}

}  // namespace pyruntime
