#include "transport/device/wait_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <pthread.h>
#include <string>
#include <thread>

#include "transport/flights.h"

namespace pyruntime {

namespace {

constexpr std::chrono::milliseconds kPeriod{100};

// The library's functions work on the device that is current in the calling thread.
void make_current(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

}  // namespace

bool has_failed(const char* header_seen) {
  return std::any_of(header_seen, header_seen + kDeviceHeaderBytes, [](char byte) { return byte != 0; });
}

std::optional<Failure> read_failure(const WatchedWorkspace& workspace, void* stream) {
  const GroupContext& context = *workspace.context;
  const DeviceLibrary& library = *workspace.library;
  PyruntimeFailure failure{};
  library.check(library.failure(&workspace.group, &failure, stream));
  if (failure.state == PYRUNTIME_NO_FAILURE) return std::nullopt;
  const std::string peer = context.name_of(failure.peer);
  failure.rank = context.job_rank(failure.rank);
  failure.peer = context.job_rank(failure.peer);
  std::array<char, 512> sentence{};
  library.check(library.describe_failure(&failure, sentence.data(), sentence.size()));
  return failure_of(context, CommErrorKind::kTimeout,
                    "group '" + context.name + "' on " + workspace.device.str() + ": " + sentence.data() +
                        " It waited for " + peer + ".");
}

WaitWatch& WaitWatch::instance() {
  static auto* watch = new WaitWatch();  // never destroyed: its thread may outlive static destructors
  return *watch;
}

int64_t WaitWatch::add(const WatchedWorkspace& workspace) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (streams_.count(workspace.device) == 0) {
    void* stream = nullptr;
    workspace.library->check(workspace.library->new_stream(&stream));
    streams_[workspace.device] = stream;
  }
  std::vector<bool> has_left(workspace.processes->size());
  watched_.push_back({workspace, ++last_, /*given_up=*/false, std::move(has_left)});
  if (!runs_) std::thread([this] { watch(); }).detach();
  runs_ = true;
  added_.notify_all();
  return last_;
}

void WaitWatch::remove(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_.remove_if([&](const Watched& each) { return each.number == number; });
}

std::optional<Failure> WaitWatch::find_failure(Watched& watched) {
  const WatchedWorkspace& workspace = watched.workspace;
  if (has_failed(workspace.header_seen)) return read_failure(workspace, streams_.at(workspace.device));
  const GroupContext& context = *workspace.context;
  const PeerProcesses& processes = *workspace.processes;
  for (int peer = 0; peer < static_cast<int>(processes.size()); ++peer) {
    if (watched.has_left[peer] || !processes[peer].gone()) continue;
    watched.has_left[peer] = FailureBoard::instance().has_left(context.job_rank(peer));
    if (watched.has_left[peer]) continue;
    return failure_of(context, CommErrorKind::kPeerLost,
                      "group '" + context.name + "' on " + workspace.device.str() + ": the process of " +
                          context.name_of(peer) + " has ended.");
  }
  return std::nullopt;
}

void WaitWatch::stop(const WatchedWorkspace& workspace) {
  workspace.library->check(workspace.library->stop(&workspace.group, streams_.at(workspace.device)));
  workspace.stopped->store(true);
}

void WaitWatch::watch() {
  pthread_setname_np(pthread_self(), "pyr-waits");
  FailureBoard& board = FailureBoard::instance();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    added_.wait(lock, [&] { return !watched_.empty(); });
    for (Watched& watched : watched_) {
      if (watched.given_up || *watched.workspace.stopped) continue;
      try {
        make_current(watched.workspace.device);
        const std::optional<Failure> failure = board.has_failed() ? std::nullopt : find_failure(watched);
        if (failure) board.post(*failure);
        if (board.has_failed()) stop(watched.workspace);
      } catch (const std::exception& error) {
        // The device is broken, and then no kernel waits either; the rank's own calls raise it.
        TORCH_WARN("The waits of kernels in group '", watched.workspace.context->name,
                   "' are not watched any more: ", error.what());
        watched.given_up = true;
      }
    }
    lock.unlock();
    std::this_thread::sleep_for(kPeriod);
    lock.lock();
  }
}

}  // namespace pyruntime
