#include "transport/settings.h"

#include <c10/util/Exception.h>

#include <sstream>

#include "core/text.h"

namespace pyruntime {

std::string GroupKey::name() const {
  if (!companion) return process_group;
  const std::string class_name = name_of(*companion);
  const std::string ranks =
      edge ? ", " + std::to_string(edge->first) + " to " + std::to_string(edge->second) : "";
  const std::string place =
      within == 0 ? "" : std::string(within > 0 ? ", +" : ", ") + std::to_string(within);
  return process_group + " (" + class_name + place + ranks + ")";
}

namespace {

constexpr const char* kKindNames[] = {"auto",          "symmetric_memory", "hierarchical",
                                      "process_group", "device",           "collectives"};
constexpr const char* kMulticastNames[] = {"off", "gather", "gather_and_reduce"};

}  // namespace

TransportKind transport_kind_named(const std::string& name) {
  return named<TransportKind>(kKindNames, name,
                              "transport='" + name +
                                  "' is no transport; use 'auto', 'symmetric_memory', 'hierarchical', "
                                  "'process_group', 'device' or 'collectives'.");
}

Multicast multicast_named(const std::string& name) {
  return named<Multicast>(kMulticastNames, name,
                          "multicast='" + name + "' is none; use 'off', 'gather' or 'gather_and_reduce'.");
}

const char* name_of(Multicast multicast) {
  return kMulticastNames[static_cast<int>(multicast)];
}

std::string GroupSettings::text() const {
  std::ostringstream text;
  text << "transport=" << kKindNames[static_cast<int>(transport)] << ", multicast=" << name_of(multicast)
       << ", chunk_bytes=" << ring.chunk_bytes
       << ", wire_dtype=" << (ring.wire == c10::ScalarType::Undefined ? "None" : c10::toString(ring.wire))
       << ", hosts=[";
  for (const std::string& host : hosts) text << host << " ";
  text << "], rings=[" << rings.text() << "]";
  return text.str();
}

GroupSettings GroupSettings::among(const std::vector<int>& ranks) const {
  GroupSettings some = *this;
  // A choice for all ranks may be impossible among some: a host may have only one of them.
  if (transport == TransportKind::kHierarchical) some.transport = TransportKind::kAuto;
  some.rings = Rings();
  some.hosts.clear();
  for (const int rank : ranks) {
    if (!hosts.empty()) some.hosts.push_back(hosts.at(rank));
  }
  return some;
}

}  // namespace pyruntime
