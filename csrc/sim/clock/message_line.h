// The moments of messages between programs in virtual time.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {

// Messages between ranks that all are of different programs, on a stream of each. What a rank asks for in one
// call is a batch; batches of a stream come one after the other. A message leaves when the batches of both
// its ends have begun, and a batch ends with its last message. Programs say their batches when they ask for
// them, and work out moments when somebody waits: nobody waits for another's host before.
class MessageLine {
 public:
  struct Message {
    int from, to;  // ranks of the job
    double seconds;
  };
  struct Moments {
    double begun = 0, ended = 0;  // when all messages have left, and have arrived
  };

  MessageLine(std::string name, int own) : name_(std::move(name)), own_(own) {}

  // The stream comes to a batch at `ready`, if it has ended those before. Returns the batch's number.
  int64_t add(double ready, const std::vector<Message>& messages);
  Moments of(int64_t number) { return moments(own_, number); }

 private:
  struct Batch {
    double ready;
    std::vector<std::pair<Message, int64_t>> messages;  // with their numbers among those of the same ends
  };

  std::string key(const Message& one, int64_t number, bool sends) const;
  const Batch& batch(int rank, int64_t number);
  // The number of the batch in which that message is sent, or received.
  int64_t batch_with(const Message& one, int64_t number, bool sends);
  double begin(int rank, int64_t number);
  // Raises RuntimeError for batches that wait for each other.
  Moments moments(int rank, int64_t number);

  const std::string name_;
  const int own_;
  int64_t added_ = 0;
  std::map<std::pair<int, int>, int64_t> numbers_;  // of messages so far, by (from, to)
  std::map<std::string, int64_t> batch_of_;         // by key
  std::map<std::pair<int, int64_t>, Batch> batches_;
  std::map<std::pair<int, int64_t>, Moments> known_;
  std::set<std::pair<int, int64_t>> asked_;  // which are being worked out
};

}  // namespace sim
