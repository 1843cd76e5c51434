// How the control connections of a group are made; ranks are threads here.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <arpa/inet.h>
#include <future>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <vector>

#include "check.h"
#include "core/job/store.h"
#include "transport/ring/control_line.h"

namespace {

using pyruntime::UniqueFd;

constexpr double kDeadlineSeconds = 10.0;
constexpr char kPrefix[] = "line/";

pyruntime::ControlLines lines_of(c10d::Store& store, int rank) {
  const pyruntime::GroupContext context{"group", rank, 2, kDeadlineSeconds};
  return connect_control_lines(store, kPrefix, context, {1 - rank});
}

// A connection to where rank 0 listens, of somebody who has said nothing.
UniqueFd silent_stranger(c10d::Store& store) {
  const std::string key = std::string(kPrefix) + "0";
  EXPECT(pyruntime::await_key(store, key, kDeadlineSeconds));
  const std::string text = store.get_to_str(key);
  const size_t first = text.find(' ');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  EXPECT(inet_pton(AF_INET, text.substr(0, first).c_str(), &address.sin_addr) == 1);
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(text.substr(first + 1))));
  UniqueFd made(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT(connect(made.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  return made;
}

TEST(silent_strangers_who_come_first_keep_no_peer_out) {
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  c10d::HashStore store;
  auto listening = std::async(std::launch::async, [&] { return lines_of(store, 0); });
  std::vector<UniqueFd> strangers;
  for (int number = 0; number < 3; ++number) strangers.push_back(silent_stranger(store));
  strangers.pop_back();  // one that hangs up
  auto calling = std::async(std::launch::async, [&] { return lines_of(store, 1); });
  EXPECT(calling.get().count(0) == 1);
  EXPECT(listening.get().count(1) == 1);
}

}  // namespace
