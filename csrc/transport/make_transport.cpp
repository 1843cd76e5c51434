// Chooses a group's transport and makes it.

#include <utility>

#include "core/arbiter.h"
#include "core/text.h"
#include "transport/collectives.h"
#include "transport/device/hosts/rails.h"
#include "transport/device/hosts/several_hosts.h"
#include "transport/device/library.h"
#include "transport/device/one_host.h"
#include "transport/group.h"
#include "transport/host/one_host.h"
#include "transport/ring/ring.h"

namespace pyruntime {

namespace {

struct TransportMaker {
  std::unique_ptr<Transport> for_cpu();
  std::unique_ptr<Transport> for_device(c10::Device device);
  // Makes the transport over the process group's own collectives; `why` there is no other. All of its ranks
  // take part, so a companion of two ranks cannot use it: its ops are sends, which ask why_not_chunked().
  std::unique_ptr<Transport> collectives(c10::Device device, std::string why) {
    return make_collectives_transport(context, rendezvous.process_group(), device, std::move(why));
  }
  std::unique_ptr<Transport> ring(const HostLayout& over);

  // Tells messages of this rendezvous apart from those of others over the same process group.
  int instance() const {
    constexpr int64_t kPlaces = 6;                         // places within a class: -2 to 3
    const int64_t groups = 1 + kPlaces * kTrafficClasses;  // groups that share the process group and a rank
    const int64_t own =
        key.companion ? 1 + kPlaces * static_cast<int64_t>(*key.companion) + key.within + 2 : 0;
    return static_cast<int>((gathered.number * groups + own) % (int64_t{1} << 30));
  }
  // Each raises ValueError if the feature was requested and there is a reason against it.
  void check_multicast_can_be(const std::string& why_not) const;
  void check_rings_can_be(const std::string& why_not) const;
  void check_multicast_on_all(c10::Device device, const DeviceLibrary* library, const std::string& why_none);

  GroupContext& context;
  Rendezvous& rendezvous;
  const GroupKey& key;
  const GroupSettings& settings;
  Gathered gathered;
  HostLayout layout;
};

void TransportMaker::check_multicast_can_be(const std::string& why_not) const {
  TORCH_CHECK_VALUE(settings.multicast == Multicast::kOff || why_not.empty(), "multicast='",
                    name_of(settings.multicast), "' was asked for group '", context.name, "', and ", why_not,
                    "; it is for the devices of one host with the kernels built. Leave multicast out.");
}

void TransportMaker::check_rings_can_be(const std::string& why_not) const {
  TORCH_CHECK_VALUE(settings.rings.empty() || why_not.empty(), "The rings ", settings.rings.text(),
                    " were asked for group '", context.name, "', and ", why_not,
                    "; rows go around rings between the devices of one host. Leave rings out.");
}

// Checked on all ranks: a rank that cannot must not leave the others waiting for its memory.
void TransportMaker::check_multicast_on_all(c10::Device device, const DeviceLibrary* library,
                                            const std::string& why_none) {
  const std::string own = library == nullptr ? why_none : why_no_multicast(device, *library);
  const std::string can = "can";
  int rank = 0;
  for (const std::string& found :
       rendezvous.exchange("multicast/" + std::to_string(gathered.number), own.empty() ? can : own)) {
    check_multicast_can_be(found == can ? "" : context.name_of(rank) + " cannot: " + found);
    ++rank;
  }
}

std::unique_ptr<Transport> TransportMaker::for_device(c10::Device device) {
  const int hosts = layout.hosts();
  std::string why_no_library;
  const DeviceLibrary* library = DeviceLibrary::find(device.type(), why_no_library);
  const std::string why_far = hosts > 1 ? "its ranks are on " + std::to_string(hosts) + " hosts" : "";
  check_multicast_can_be(why_far);
  check_rings_can_be(why_far);
  if (settings.multicast != Multicast::kOff) check_multicast_on_all(device, library, why_no_library);
  if (hosts > 1) {
    std::string why_not;
    const std::string pair = key.edge ? context.name + "/" + std::to_string(gathered.number) : "";
    auto exchange = Exchange::make(context, rendezvous.process_group(), device, instance(), pair, why_not);
    if (!exchange) return collectives(device, why_not);
    const bool has_rails = layout.even() && layout.ranks_per_host() > 1 && library != nullptr;
    const auto straight = [&](std::unique_ptr<Exchange> by) {
      return make_several_hosts_device_transport(context, std::move(by), device, hosts, library);
    };
    if (!has_rails || settings.transport == TransportKind::kProcessGroup) {
      return straight(std::move(exchange));
    }
    constexpr int kBesideRails = 1 << 10;  // tells its messages apart from those on rails
    auto beside =
        Exchange::make(context, rendezvous.process_group(), device, instance() + kBesideRails, pair, why_not);
    std::vector<pid_t> pids;
    for (const int rank : layout.ranks_of(layout.host())) pids.push_back(gathered.pids[rank]);
    PeerProcesses processes(pids.begin(), pids.end());
    return make_rails_transport(context, std::move(exchange), straight(std::move(beside)),
                                rendezvous.workspace_group(gathered, layout), std::move(processes), layout,
                                device, *library, settings);
  }
  check_rings_can_be(why_no_library);
  if (library == nullptr) return collectives(device, why_no_library);
  PeerProcesses processes(gathered.pids.begin(), gathered.pids.end());
  return std::make_unique<DeviceTransport>(context, rendezvous.workspace_group(gathered, layout),
                                           std::move(processes), device, *library, settings);
}

std::unique_ptr<Transport> TransportMaker::for_cpu() {
  const TransportKind asked = settings.transport;
  const std::string why_cpu = asked == TransportKind::kDevice ? "" : "an op has tensors on the CPU";
  check_multicast_can_be(why_cpu);
  check_rings_can_be(why_cpu);
  const bool one_host = layout.hosts() == 1;
  const bool can_be_hierarchical = !one_host && layout.even() && layout.ranks_per_host() > 1;
  TORCH_CHECK_VALUE(asked != TransportKind::kSymmetric || one_host,
                    "transport='symmetric_memory' was asked for group '", context.name,
                    "', whose ranks are on ", layout.hosts(), " hosts; use 'auto' or 'process_group'.");
  TORCH_CHECK_VALUE(asked != TransportKind::kHierarchical || can_be_hierarchical,
                    "transport='hierarchical' was asked for group '", context.name, "', whose ",
                    context.world_size, " ranks are on ", layout.hosts(),
                    " host(s); it needs several hosts with the same number of ranks, more than one.");
  if (asked == TransportKind::kDevice) return for_device(c10::kCPU);
  if (asked == TransportKind::kProcessGroup || (!one_host && !can_be_hierarchical)) {
    return ring(HostLayout::one_rank_each(context.world_size, context.rank));
  }
  if (!one_host) return ring(layout);
  return make_one_host_transport(context, rendezvous.workspace_group(gathered, layout));
}

std::unique_ptr<Transport> TransportMaker::ring(const HostLayout& over) {
  const auto& process_group = rendezvous.process_group();
  auto link = make_process_group_link(process_group, context.process_group_ranks);
  if (!link) return collectives(c10::kCPU, "its process group has no backend for CPU tensors");
  const std::string topic = "ring/" + context.name + "/" + std::to_string(gathered.number) + "/";
  std::vector<std::string> names;
  for (int host = 0; host < over.hosts(); ++host) {
    names.push_back(gathered.hosts[over.ranks_of(host).front()]);
  }
  const int flags = ring_flags(context.world_size, over.hosts());
  auto workspace = over.ranks_per_host() == 1
                       ? make_private_workspace(context, flags)
                       : make_symmetric_workspace(context, rendezvous.workspace_group(gathered, over),
                                                  over.ranks_of(over.host()), over.local_rank(), flags);
  auto lines = connect_control_lines(*process_group->getStore(), "pyruntime/" + topic + "line/", context,
                                     ring_neighbours(over));
  int round = 0;
  const auto agree = [&](const std::vector<double>& own) {
    return rendezvous.agree(topic + "cost/" + std::to_string(round++), own);
  };
  RingParts parts{
      over, names, std::move(workspace), std::move(link), std::move(lines), &Arbiter::instance(), instance()};
  return make_ring_transport(context, std::move(parts), settings.ring, agree);
}

}  // namespace

std::unique_ptr<Transport> Group::make_transport(c10::Device device) {
  try {
    return open_transport(device);
  } catch (const c10::DistError& error) {  // the store, or the way to a peer
    rendezvous_.raise_for_missing("The first op of group '" + name() + "'", first_line(error.what()));
  }
}

std::unique_ptr<Transport> Group::open_transport(c10::Device device) {
  TORCH_CHECK(!device.is_cpu() || !context_.link_is_broken, "Group '", name(),
              "' cannot be opened again: its connections still hold parts of an op that failed; make the "
              "process group anew (torch.distributed.destroy_process_group, or a restart of the job).");
  Gathered gathered = rendezvous_.gather(settings_);
  const HostLayout layout(gathered.hosts, rank());
  TransportMaker maker{context_, rendezvous_, key_, settings_, std::move(gathered), layout};
  if (settings_.transport == TransportKind::kCollectives) {
    maker.check_rings_can_be("transport='collectives' leaves all to the process group");
    return maker.collectives(device, "transport='collectives' was asked for");
  }
  return device.is_cpu() ? maker.for_cpu() : maker.for_device(device);
}

}  // namespace pyruntime
