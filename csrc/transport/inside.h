// One thread at a time inside the ops of a group: ops pair with the other ranks' in the order in which they
// begin, and that of two threads is another on each rank.
#pragma once

#include <functional>
#include <string>
#include <sys/types.h>
#include <utility>

#include "transport/group_context.h"

namespace pyruntime {

// From the beginning of an op of a group until its end, on the thread that runs it; an op within an op of the
// same thread is allowed. Raises on all ranks, where another thread is inside: the ranks may have paired the
// one thread's op with the other's, so neither of the two returns a result, and the group is out of step.
class Inside {
 public:
  Inside(GroupContext& context, Op op);
  ~Inside();
  Inside(Inside&& other) noexcept : context_(std::exchange(other.context_, nullptr)) {}
  Inside& operator=(Inside&&) = delete;

  // Before the op returns what it has computed: raises where another thread has tried to begin one meanwhile.
  void check() const;

 private:
  void leave();

  GroupContext* context_;  // null: moved from
};

// How people know a thread of this process, by its number (gettid). Set once.
void set_thread_namer(std::function<std::string(pid_t)> namer);

}  // namespace pyruntime
