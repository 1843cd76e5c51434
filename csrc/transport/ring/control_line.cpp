#include "transport/ring/control_line.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ifaddrs.h>
#include <iterator>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "core/deadline.h"
#include "core/job/store.h"
#include "core/text.h"
#include "transport/flights.h"

namespace pyruntime {

namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

// The first bytes that a rank sends on a connection that it opened.
struct Hello {
  uint64_t token;  // from the listener's entry in the store: only ranks of this group know it
  int32_t rank;
  int32_t unused;
};

// An accepted connection, and the part of its hello that has come.
struct Greeting {
  UniqueFd connection;
  Hello hello{};
  size_t got = 0;

  bool is_whole() const { return got == sizeof(hello); }
  // Returns false if the other side has closed it.
  bool receive() {
    while (!is_whole()) {
      const ssize_t count =
          recv(connection.get(), reinterpret_cast<char*>(&hello) + got, sizeof(hello) - got, 0);
      if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
      got += static_cast<size_t>(count);
    }
    return true;
  }
};

// The most connections without a whole hello; beyond that the oldest counts as a stranger's.
constexpr size_t kMostGreeting = 256;

// The address of a network interface, as GLOO_SOCKET_IFNAME names it.
bool address_of_interface(const std::string& name, Address& address) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  bool found = false;
  for (const ifaddrs* entry = list; entry != nullptr && !found; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || name != entry->ifa_name) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, entry->ifa_addr, address.length);
    found = true;
  }
  freeifaddrs(list);
  return found;
}

bool resolve(const std::string& host, const std::string& port, Address& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &list) != 0 || list == nullptr) return false;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.length = list->ai_addrlen;
  freeaddrinfo(list);
  return true;
}

// The address under which peers reach this host: that of the interface that gloo was told to use; else the
// one on the route to the job's master; else what the host's own name resolves to.
Address own_address() {
  Address address;
  if (const char* names = std::getenv("GLOO_SOCKET_IFNAME")) {
    const std::string first = std::string(names).substr(0, std::string(names).find(','));
    TORCH_CHECK_VALUE(address_of_interface(first, address), "GLOO_SOCKET_IFNAME=", names,
                      " names no interface of this host that has an address; `ip address` lists them.");
    return address;
  }
  if (const char* master = std::getenv("MASTER_ADDR")) {
    Address target;
    if (resolve(master, "9", target)) {
      // Connecting a datagram socket sends nothing; it only chooses the route.
      const UniqueFd probe(socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
      address.length = sizeof(address.storage);
      if (probe.valid() && connect(probe.get(), target.get(), target.length) == 0 &&
          getsockname(probe.get(), address.get(), &address.length) == 0) {
        return address;
      }
    }
  }
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  if (resolve(name, "0", address)) return address;
  TORCH_CHECK(resolve("127.0.0.1", "0", address), "This host has no network address, not even a loopback.");
  return address;
}

void set_port(Address& address, uint16_t port) {
  if (address.family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port = htons(port);
  }
}

std::string text_of(const Address& address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  Address copy = address;
  if (getnameinfo(copy.get(), copy.length, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  return std::string(host) + " " + port;
}

class Caller {
 public:
  Caller(c10d::Store& store, const std::string& prefix, const GroupContext& context)
      : store_(store),
        prefix_(prefix),
        context_(context),
        end_(monotonic_seconds() + context.deadline_seconds) {
    Address address = own_address();
    set_port(address, 0);
    listener_ = UniqueFd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener_.valid()) fail("open a socket");
    if (bind(listener_.get(), address.get(), address.length) != 0) {
      fail("listen on " + text_of(address));
    }
    if (listen(listener_.get(), 64) != 0) fail("listen");
    address.length = sizeof(address.storage);
    getsockname(listener_.get(), address.get(), &address.length);
    std::random_device random;
    token_ = (uint64_t{random()} << 32) | random();
    store_.set(key(context.rank), text_of(address) + " " + std::to_string(token_));
  }

  UniqueFd call(int peer) {
    if (!await_key(store_, key(peer), end_ - monotonic_seconds())) late(peer, "say where it listens");
    const std::string text = store_.get_to_str(key(peer));
    const size_t first = text.find(' '), second = text.rfind(' ');
    Address address;
    TORCH_CHECK(resolve(text.substr(0, first), text.substr(first + 1, second - first - 1), address),
                "Group '", context_.name, "': ", context_.name_of(peer), " listens on '", text,
                "', which is no address here.");
    const Hello hello{std::stoull(text.substr(second + 1)), context_.rank, 0};
    const std::string name = context_.name_of(peer);
    const std::string reach = "reach " + name + " at " + text_of(address);
    UniqueFd connection(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!connection.valid()) fail("open a socket");
    if (connect(connection.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
      lose(reach);
    }
    await_io(connection.get(), POLLOUT, peer);
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(connection.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    errno = error;
    if (error != 0) lose(reach);
    if (::send(connection.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) {
      lose("greet " + name);
    }
    return connection;
  }

  // Peers connect in any order. So do strangers, who may send nothing.
  std::pair<int, UniqueFd> answer(const std::vector<int>& expected) {
    while (true) {
      await_call(expected.front());
      UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (connection.valid()) greeting_.push_back({std::move(connection)});
      if (greeting_.size() > kMostGreeting) greeting_.pop_front();
      for (auto each = greeting_.begin(); each != greeting_.end();) {
        const bool is_open = each->receive();
        const bool known = std::find(expected.begin(), expected.end(), each->hello.rank) != expected.end();
        if (each->is_whole() && each->hello.token == token_ && known) {
          std::pair<int, UniqueFd> found{each->hello.rank, std::move(each->connection)};
          greeting_.erase(each);
          return found;
        }
        // Anything else is a stranger: not of this group.
        each = is_open && !each->is_whole() ? std::next(each) : greeting_.erase(each);
      }
    }
  }

 private:
  std::string key(int rank) const { return prefix_ + std::to_string(rank); }

  void await_io(int fd, short events, int peer) { await_any({{fd, events, 0}}, peer); }

  void await_call(int peer) {
    std::vector<pollfd> descriptors{{listener_.get(), POLLIN, 0}};
    for (const Greeting& each : greeting_) descriptors.push_back({each.connection.get(), POLLIN, 0});
    await_any(std::move(descriptors), peer);
  }

  void await_any(std::vector<pollfd> descriptors, int peer) {
    bool is_ready = false;
    while (!is_ready) {
      is_ready = poll(descriptors.data(), descriptors.size(), 5) > 0;
      if (monotonic_seconds() > end_) late(peer, "connect");  // also where strangers keep it ready
      check_wait();
    }
  }

  [[noreturn]] void fail(const std::string& what) { TORCH_CHECK(false, cannot(what)); }

  // The peer, or the route to it, failed.
  [[noreturn]] void lose(const std::string& what) { C10_THROW_ERROR(DistNetworkError, cannot(what)); }

  std::string cannot(const std::string& what) const {
    const int code = errno;
    return "The control connection of " + context_.own_name() + " of group '" + context_.name + "' cannot " +
           what + " (" + std::strerror(code) + ").";
  }

  [[noreturn]] void late(int peer, const char* what) {
    raise_for_all(failure_of(context_, CommErrorKind::kTimeout,
                             "opening group '" + context_.name + "' over the network, " +
                                 context_.own_name() + " waiting for " + context_.name_of(peer) + " to " +
                                 what + ": not within the deadline of " +
                                 seconds_text(context_.deadline_seconds) + "."));
  }

  c10d::Store& store_;
  std::string prefix_;
  const GroupContext& context_;
  double end_;
  UniqueFd listener_;
  uint64_t token_ = 0;
  std::deque<Greeting> greeting_;
};

}  // namespace

ControlLine::ControlLine(UniqueFd connection) : connection_(std::move(connection)) {
  const int on = 1;
  // Fails on a socket that is not TCP (tests use a pair), which has no delay to switch off.
  setsockopt(connection_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool ControlLine::send(const ControlMessage& message) {
  const std::lock_guard<std::mutex> lock(sending_);
  return ::send(connection_.get(), &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof(message));
}

bool ControlLine::receive(const std::function<void(const ControlMessage&)>& handle) {
  char buffer[64 * sizeof(ControlMessage)];
  while (true) {
    const ssize_t count = recv(connection_.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count == 0) return false;
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    received_.insert(received_.end(), buffer, buffer + count);
    size_t taken = 0;
    for (; received_.size() - taken >= sizeof(ControlMessage); taken += sizeof(ControlMessage)) {
      ControlMessage message;
      std::memcpy(&message, received_.data() + taken, sizeof(message));
      handle(message);
    }
    received_.erase(received_.begin(), received_.begin() + static_cast<ptrdiff_t>(taken));
  }
}

ControlLines connect_control_lines(c10d::Store& store, const std::string& prefix, const GroupContext& context,
                                   const std::vector<int>& peers) {
  Caller caller(store, prefix, context);
  ControlLines lines;
  std::vector<int> callers;
  for (const int peer : peers) {
    if (peer > context.rank) {
      callers.push_back(peer);
    } else {
      lines[peer] = std::make_shared<ControlLine>(caller.call(peer));
    }
  }
  while (!callers.empty()) {
    auto [peer, connection] = caller.answer(callers);
    lines[peer] = std::make_shared<ControlLine>(std::move(connection));
    callers.erase(std::find(callers.begin(), callers.end(), peer));
  }
  return lines;
}

}  // namespace pyruntime
