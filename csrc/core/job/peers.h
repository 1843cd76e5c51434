// Lets the ranks of a job exchange values through its store and check whether they live. For the time before
// groups have workspaces, and to name missing ranks where torch's messages cannot.
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

namespace pyruntime {

// Written to the store by each rank a few times a second, for as long as its process runs.
struct SignOfLife {
  std::string host;  // host_identity()
  pid_t pid = 0;
  uint64_t count = 0;
  bool waits = false;  // waits for a peer, in an op
  std::string host_name;

  std::string text() const;
  static SignOfLife of(const std::string& text);
};

// The subject of a wait, and its limit.
struct Waiting {
  std::string for_what;  // "Building the corpus, rank 1 waiting for rank 0"
  std::string group;     // the group whose ranks are out of step if it fails
  double seconds;
  // `seconds` then limit the peer's silence: a peer that shows signs of life may take a day.
  bool while_it_lives = false;
};

// Writes `value` to the job's store, sealed (sealed.h).
void tell(const std::string& key, const std::string& value, const Waiting& waiting);

// The number of calls with this key so far, by this rank and by its predecessors in its place.
int64_t count(const std::string& key, const Waiting& waiting);

// The value that rank `rank` of the job has written under `key`. Raises, on all ranks: PeerLost if its
// process has ended; CommTimeout if the value does not come in time or the rank shows no sign of life;
// CommError if the bytes were not written by a rank.
std::string hear(const std::string& key, int rank, const Waiting& waiting);

// Called when a collective of torch has failed with `cause` while `ranks` of the job took part. Raises, on
// all ranks, what another rank has reported, or names the rank that has ended or shows no sign of life.
[[noreturn]] void raise_for_missing(const std::vector<int>& ranks, const Waiting& waiting,
                                    const std::string& cause);

// Waits for a better-informed rank's report, a second at most, and raises it; returns if none comes. For a
// rank that has waited for `rank` until the deadline: if `rank` lives and itself waits for a third rank,
// whoever waits for the culprit is about to name it.
void await_better_word(int rank);

// Raises, on all ranks, what a rank has reported, or PeerLost that names a rank whose process on this host
// has ended without leaving the job. For a rank that is told to stop: a launcher stops all ranks when one has
// failed.
void raise_for_ended(const Waiting& waiting);

}  // namespace pyruntime
