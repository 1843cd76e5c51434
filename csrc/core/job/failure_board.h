// Where the first failure of a job is written for all its ranks to see, so that all stop with the same cause.
//
// Every process looks at the job's store a few times a second, from a thread of its own, and every wait on a
// peer looks at what the thread found. The thread leaves a sign of life each time: a process that computes
// gives it, one that is stopped or gone does not.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/error.h"

namespace pyruntime {

struct Failure {
  CommErrorKind kind;
  std::string message;
  std::string group;  // which is out of step because of it
  int rank = -1;      // in the job, of the one that reported it
};

class FailureBoard {
 public:
  // The one of this process.
  static FailureBoard& instance();

  // From now on failures are shared through `store` with the other ranks of the job, which all pass the same
  // one. With another store it leaves the job that it was in. `connection` leads to the same store and is the
  // watching thread's alone; without one it makes its own. `served_by`: the rank whose process serves the
  // store, -1 where it is a launcher's or not known.
  void join(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
            const c10::intrusive_ptr<c10d::Store>& connection = {}, int served_by = -1);
  // Says in the store that this rank has left, and ends the watching thread, or leaves it to itself where it
  // hangs in a store that does not answer.
  void leave();

  // The ranks of the job; 1: there is none.
  int world_size();
  // Where a rank that has left says so, which one that was killed has not.
  std::string left_key(int rank);

  // Whether it is in the job of that very store.
  bool has_joined(const c10::intrusive_ptr<c10d::Store>& store);

  // Has the watching thread ask the store, so that a store that does not answer holds up nobody. Ctrl-C, the
  // job's failure and a ScopedWaitCheck end the wait.
  enum class Asked { kAnswered, kTimeout, kStoreGone };
  // `question` owns what it writes to: it may come to run when nobody waits for it any more.
  using Question = std::function<void(c10d::Store&)>;
  Asked ask(Question question, double seconds);

  // What it means that the store is gone: for the end of a sentence.
  std::string words_of_lost_store();

  // Where the sign of life of that rank of the job stands: a SignOfLife as text.
  std::string life_key(int rank);

  // Shows a failure to all ranks and returns the one that was there first, which may be another's. Never
  // throws, and takes half a second at most: where the store cannot be reached the failure stays this rank's
  // own, and where a rank serves it that one is named.
  Failure post(Failure failure);

  // Raises the job's failure, if there is one, in the words of the rank that met it.
  void raise_if_failed();

  // The ranks go on after a failure, having closed the group that failed: forgets it where `is_over` says so
  // of that group's name. All ranks of the job call it.
  void clear(const std::function<bool(const std::string&)>& is_over);

 private:
  struct Session;

  // The watching thread; it holds the session, not the board.
  static void watch(const std::shared_ptr<Session>& session);

  std::mutex mutex_;  // guards the pointer
  std::shared_ptr<Session> session_;
  std::shared_ptr<Session> session();
};

// Posts and raises: this failure, or the one that was there first.
[[noreturn]] void raise_for_all(const Failure& failure);

}  // namespace pyruntime
