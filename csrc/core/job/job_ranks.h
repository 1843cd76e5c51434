// Names the ranks of a job in messages: "rank 2 (tp 0, dp 1; process 4711 on node3)". Ops know a rank by its
// number in their group, which differs between groups; messages use its number in the job.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <vector>

namespace pyruntime {

class JobRanks {
 public:
  // The table of this process's job.
  static JobRanks& instance();

  // Finds the ranks in the job of the process group with that name and size, in the group's order. Set once,
  // before the first group. The finder may take the GIL.
  using Finder = std::function<std::vector<int>(const std::string& process_group, int size)>;
  void set_finder(Finder finder);
  // Enters a process group that Python does not know, until leave().
  void enter(const std::string& process_group, std::vector<int> ranks);
  void leave(const std::string& process_group);
  // The ranks in the job, by rank in the process group, which has `size` ranks.
  std::vector<int> of(const std::string& process_group, int size) const;

  // Sets the place of each rank on the job's mesh, by rank: "tp 0, dp 1". Empty: unknown.
  void set_coordinates(std::vector<std::string> coordinates);
  // Records the host and process of a rank.
  void learn(int rank, const std::string& host, pid_t pid);
  // Forgets the job's ranks when it is over: the next job has other processes.
  void forget();

  // "rank 2 (tp 0, dp 1)", as far as it is known.
  std::string name(int rank) const;
  // "rank 2 (tp 0, dp 1; process 4711 on node3)", as far as it is known.
  std::string name_and_place(int rank) const;

 private:
  struct Process {
    std::string host;
    pid_t pid;
  };

  std::string coordinate(int rank) const;

  mutable std::mutex mutex_;
  Finder finder_;
  std::map<std::string, std::vector<int>> entered_;
  std::vector<std::string> coordinates_;
  std::map<int, Process> processes_;
};

}  // namespace pyruntime
