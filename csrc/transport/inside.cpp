#include "transport/inside.h"

#include <atomic>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "transport/flights.h"

namespace pyruntime {

namespace {

pid_t this_thread() {
  static const thread_local auto number = static_cast<pid_t>(syscall(SYS_gettid));
  return number;
}

std::function<std::string(pid_t)>& thread_namer() {
  static auto* namer = new std::function<std::string(pid_t)>();
  return *namer;
}

std::string name_of_thread(pid_t thread) {
  return thread_namer() ? thread_namer()(thread) : "thread " + std::to_string(thread);
}

}  // namespace

void set_thread_namer(std::function<std::string(pid_t)> namer) {
  thread_namer() = std::move(namer);
}

Inside::Inside(GroupContext& context, Op op) : context_(&context) {
  const std::atomic_ref<pid_t> thread(context.inside.thread);
  pid_t other = 0;
  if (!thread.compare_exchange_strong(other, this_thread(), std::memory_order_acquire) &&
      other != this_thread()) {
    std::atomic_ref<bool>(context.inside.contended).store(true);
    const Op theirs = context.inside.op;
    raise_for_all(failure_of(
        context, CommErrorKind::kDisagree,
        "Group '" + context.name + "' was used by two threads at once on " + context.own_name() + ": " +
            name_of_thread(this_thread()) + " called " + name_of(op) + " while " + name_of_thread(other) +
            " was in " + name_of(theirs) +
            ". Ranks pair ops by the order in which they begin: let one thread after another call them, in "
            "the same order on all ranks, or make a group for each thread (torch.distributed.new_group)."));
  }
  ++context.inside.depth;
  context.inside.op = op;
  try {
    check();
  } catch (...) {
    leave();
    throw;
  }
}

Inside::~Inside() {
  if (context_ != nullptr) leave();
}

void Inside::leave() {
  if (--context_->inside.depth > 0) return;
  std::atomic_ref<pid_t>(context_->inside.thread).store(0, std::memory_order_release);
}

void Inside::check() const {
  if (!std::atomic_ref<bool>(context_->inside.contended).load(std::memory_order_relaxed)) return;
  FailureBoard::instance().raise_if_failed();
  raise_out_of_step(*context_, "two threads used it at once");
}

}  // namespace pyruntime
