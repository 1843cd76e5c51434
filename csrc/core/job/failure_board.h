// Shares the first failure of a job with all its ranks, so that all stop with the same cause.
//
// In every process a thread reads the job's store a few times a second, and every wait on a peer checks what
// the thread found. The thread writes a sign of life each time: a process that computes gives it, one that is
// stopped or gone does not.
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
  std::string group;  // the group that is out of step because of it
  int rank = -1;      // rank in the job that reported it
};

class FailureBoard {
 public:
  // This process's board.
  static FailureBoard& instance();

  // Shares failures through `store` with the other ranks of the job, which all pass the same store. With
  // another store this process leaves its former job. `connection` leads to the same store and is used only
  // by the watching thread; without one the thread makes its own. `served_by`: the rank whose process serves
  // the store; -1 if a launcher does, or if unknown.
  void join(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
            const c10::intrusive_ptr<c10d::Store>& connection = {}, int served_by = -1);
  // Writes to the store that this rank has left, and ends the watching thread. A thread that hangs in a store
  // that does not answer is left to itself.
  void leave();

  // The number of ranks of the job; 1 without a job.
  int world_size();
  // The key under which a rank says that it has left; a killed rank has not written it.
  std::string left_key(int rank);

  // Whether this process is in the job of that very store.
  bool has_joined(const c10::intrusive_ptr<c10d::Store>& store);

  // Has the watching thread ask the store, so that a store that does not answer blocks nobody else. Ctrl-C,
  // the job's failure and a ScopedWaitCheck end the wait.
  enum class Asked { kAnswered, kTimeout, kStoreGone };
  // `question` must own what it writes to: it may run when nobody waits for it any more.
  using Question = std::function<void(c10d::Store&)>;
  Asked ask(Question question, double seconds);

  // Says why the store is gone, for the end of a sentence.
  std::string words_of_lost_store();

  // The key of that rank's sign of life: a SignOfLife as text.
  std::string life_key(int rank);

  // Shows a failure to all ranks and returns the job's first one, which may be another rank's. Never throws,
  // and takes half a second at most. If the store cannot be reached, the failure stays with this rank; if a
  // rank serves the store, the failure names that rank.
  Failure post(Failure failure);

  bool has_failed();
  // Whether that rank has written that it left. Waits half a second at most, and returns false if the store
  // does not answer. Any thread.
  bool has_left(int rank);

  // Raises the job's failure, if there is one, in the words of the rank that reported it.
  void raise_if_failed();

  // Forgets the failure if `is_over` returns true for its group's name: the failed group is closed and the
  // ranks go on. All ranks of the job call it.
  void clear(const std::function<bool(const std::string&)>& is_over);

 private:
  struct Session;

  // The watching thread; it owns the session, not the board.
  static void watch(const std::shared_ptr<Session>& session);

  std::mutex mutex_;  // guards the pointer
  std::shared_ptr<Session> session_;
  std::shared_ptr<Session> session();
};

// Posts a failure and raises it, or raises the one that was there first.
[[noreturn]] void raise_for_all(const Failure& failure);

}  // namespace pyruntime
