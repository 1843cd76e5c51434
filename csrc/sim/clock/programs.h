// The programs of a job in virtual time. Ranks that do the same at the same time are one program, which one
// process runs. Programs of a pipeline or a ring differ: they say on a board when their messages leave and
// when they have read, and hear the same of the others.
//
// A program waits for another only where the ranks of CPUs would wait too: for a message's moment when it is
// awaited, for room when the message four before has not been read, in a collective for all. So programs that
// end on CPUs end here.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// Begins what a stream waits for while a rank of another program has not computed what it will send; the name
// of the group follows.
inline const std::string kWorkOfAnother = "work of another rank of ";

class Programs {
 public:
  static Programs& instance();

  // `of_rank`: the program of each rank of the job; `own`: this process's. `board`: of all processes.
  void begin(int own, std::vector<int> of_rank, int gpus_per_host, c10::intrusive_ptr<c10d::Store> board);

  // The ranks of the job that the group of that name has, by rank in it.
  void know(const std::string& group, std::vector<int> job_ranks);
  const std::vector<int>& ranks_of(const std::string& group);

  int own() const { return own_; }
  int of_rank(int job_rank) const { return of_rank_.empty() ? 0 : of_rank_.at(job_rank); }
  int host_of(int job_rank) const { return gpus_per_host_ == 0 ? 0 : job_rank / gpus_per_host_; }
  bool are_several(const std::vector<int>& job_ranks) const;

  // Moments that this program says under `key`, and those that another has said, or will say, there. Raises
  // RuntimeError if it does not.
  void say(const std::string& key, const std::vector<double>& moments);
  std::vector<double> hear(const std::string& key, int program);
  // Returns the moment at which the last program of the group comes to its next meeting; this one comes at
  // `moment`.
  double meet(const std::string& group, const std::vector<int>& job_ranks, double moment);

 private:
  std::mutex mutex_;
  int own_ = 0, gpus_per_host_ = 0;
  std::vector<int> of_rank_;
  c10::intrusive_ptr<c10d::Store> board_;
  std::map<std::string, std::vector<int>> groups_;
  std::map<std::string, int64_t> meetings_;
};

}  // namespace sim
