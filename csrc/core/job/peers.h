// What the ranks of a job tell each other through its store, and whether they live: for what happens before
// their groups have workspaces, and for naming who is missing where torch's own messages cannot.
#pragma once

#include <cstdint>
#include <string>
#include <sys/types.h>
#include <vector>

namespace pyruntime {

// What a rank leaves in the store a few times a second, for as long as its process runs.
struct SignOfLife {
  std::string host;  // host_identity()
  pid_t pid = 0;
  uint64_t count = 0;
  bool waits = false;  // for a peer, in an op
  std::string host_name;

  std::string text() const;
  static SignOfLife of(const std::string& text);
};

// What is waited for, and how long.
struct Waiting {
  std::string for_what;  // "Building the corpus, rank 1 waiting for rank 0"
  std::string group;     // whose ranks are out of step where it fails
  double seconds;
  // Of silence that `seconds` are: a peer that shows signs of life may take a day.
  bool while_it_lives = false;
};

// Leaves `value` in the job's store, sealed (sealed.h).
void tell(const std::string& key, const std::string& value, const Waiting& waiting);

// The number of calls with this key so far, of this rank and of those before it in its place.
int64_t count(const std::string& key, const Waiting& waiting);

// What a rank of the job has left under `key`. Raises, on all ranks: PeerLost where its process has ended,
// CommTimeout where it does not come in time or shows no sign of life, CommError where what is there is no
// rank's word.
std::string hear(const std::string& key, int rank, const Waiting& waiting);

// For a collective of torch's that has failed with `cause` while `ranks` of the job took part: raises, on all
// ranks, what another rank has reported, or the name of the one that has ended or shows no sign of life.
[[noreturn]] void raise_for_missing(const std::vector<int>& ranks, const Waiting& waiting,
                                    const std::string& cause);

// For a rank that has waited for another until the deadline: where that one lives and waits for a third
// itself, whoever waits for the culprit is about to name it. Waits for its word, a second at most, and raises
// it; returns where none comes.
void await_better_word(int rank);

// Raises, on all ranks, what a rank has reported, or PeerLost that names a rank whose process on this host
// has ended without leaving the job. For a rank that is asked to stop: a launcher stops all when one has
// failed.
void raise_for_ended(const Waiting& waiting);

}  // namespace pyruntime
