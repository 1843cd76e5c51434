// Allows one thread at a time inside the ops of a group. Ranks pair ops by the order in which they begin, and
// the order of two threads differs between ranks.
#pragma once

#include <functional>
#include <string>
#include <sys/types.h>
#include <utility>

#include "transport/group_context.h"

namespace pyruntime {

// Lives from the beginning of an op of a group until its end, on the op's thread; an op within an op of the
// same thread is allowed. Raises on all ranks if another thread is inside. The ranks may have paired one
// thread's op with the other's, so neither returns a result, and the group is out of step.
class Inside {
 public:
  Inside(GroupContext& context, Op op);
  ~Inside();
  Inside(Inside&& other) noexcept : context_(std::exchange(other.context_, nullptr)) {}
  Inside& operator=(Inside&&) = delete;

  // Called before the op returns its result: raises if another thread has tried to begin one meanwhile.
  void check() const;

 private:
  void leave();

  GroupContext* context_;  // null: moved from
};

// Sets the function that names a thread of this process by its number (gettid). Set once.
void set_thread_namer(std::function<std::string(pid_t)> namer);

}  // namespace pyruntime
