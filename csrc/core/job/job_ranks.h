// What messages call the ranks of a job: "rank 2 (tp 0, dp 1; process 4711 on node3)". Ops know a rank by its
// number in their group, which is another in each group; messages name it by its number in the job.
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

  // Which ranks of the job the process group of that name and size has, in its order. Set once, before the
  // first group. It may want the GIL.
  using Finder = std::function<std::vector<int>(const std::string& process_group, int size)>;
  void set_finder(Finder finder);
  // The same for a process group that Python does not know, until leave().
  void enter(const std::string& process_group, std::vector<int> ranks);
  void leave(const std::string& process_group);
  // By rank in the process group, of `size` ranks.
  std::vector<int> of(const std::string& process_group, int size) const;

  // Where each rank of the job stands on its mesh, in words, by rank: "tp 0, dp 1". Empty: not known.
  void set_coordinates(std::vector<std::string> coordinates);
  // Where a rank runs.
  void learn(int rank, const std::string& host, pid_t pid);
  // The job is over: the next has other processes.
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
