#include "sim/clock/message_line.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "sim/clock/programs.h"

namespace sim {

namespace {

constexpr const char* kSameOrder = "Two ranks must send and receive in the same order.";

}  // namespace

int64_t MessageLine::add(double ready, const std::vector<Message>& messages) {
  Batch added{ready, {}};
  std::vector<double> said{ready};
  for (const Message& each : messages) {
    const int64_t number = numbers_[{each.from, each.to}]++;
    added.messages.emplace_back(each, number);
    const std::string name = key(each, number, each.from == own_);
    Programs::instance().say(name, {static_cast<double>(added_)});
    batch_of_[name] = added_;
    said.insert(said.end(), {static_cast<double>(each.from), static_cast<double>(each.to), each.seconds,
                             static_cast<double>(number)});
  }
  Programs::instance().say(name_ + "/batch/" + std::to_string(added_), said);
  batches_[{own_, added_}] = std::move(added);
  return added_++;
}

std::string MessageLine::key(const Message& one, int64_t number, bool sends) const {
  return name_ + "/message/" + std::to_string(one.from) + "/" + std::to_string(one.to) + "/" +
         std::to_string(number) + (sends ? "/send" : "/receive");
}

const MessageLine::Batch& MessageLine::batch(int rank, int64_t number) {
  const auto found = batches_.find({rank, number});
  if (found != batches_.end()) return found->second;
  const std::vector<double> said = Programs::instance().hear(name_ + "/batch/" + std::to_string(number),
                                                             Programs::instance().of_rank(rank));
  Batch heard{said.at(0), {}};
  for (size_t i = 1; i < said.size(); i += 4) {
    heard.messages.emplace_back(
        Message{static_cast<int>(said.at(i)), static_cast<int>(said.at(i + 1)), said.at(i + 2)},
        static_cast<int64_t>(said.at(i + 3)));
  }
  return batches_[{rank, number}] = std::move(heard);
}

int64_t MessageLine::batch_with(const Message& one, int64_t number, bool sends) {
  const int rank = sends ? one.from : one.to;
  const std::string name = key(one, number, sends);
  const auto found = batch_of_.find(name);
  if (found != batch_of_.end()) return found->second;
  TORCH_CHECK(rank != own_, "Messages of ", name_, " wait for each other: rank ", own_,
              " has not asked for '", name, "', for which another waits first. ", kSameOrder);
  const double heard = Programs::instance().hear(name, Programs::instance().of_rank(rank)).at(0);
  return batch_of_[name] = static_cast<int64_t>(heard);
}

double MessageLine::begin(int rank, int64_t number) {
  const double ready = batch(rank, number).ready;
  return number == 0 ? ready : std::max(ready, moments(rank, number - 1).ended);
}

MessageLine::Moments MessageLine::moments(int rank, int64_t number) {
  const std::pair<int, int64_t> which{rank, number};
  if (const auto found = known_.find(which); found != known_.end()) return found->second;
  TORCH_CHECK(asked_.insert(which).second, "Messages of ", name_, " wait for each other: call ", number,
              " of rank ", rank, " comes before what it waits for. ", kSameOrder);
  const double own = begin(rank, number);
  Moments all{own, own};
  for (const auto& [message, of_ends] : batch(rank, number).messages) {
    const bool sends = message.from == rank;
    const int64_t theirs = batch_with(message, of_ends, !sends);
    const double begun = std::max(own, begin(sends ? message.to : message.from, theirs));
    all = {std::max(all.begun, begun), std::max(all.ended, begun + message.seconds)};
  }
  asked_.erase(which);
  return known_[which] = all;
}

}  // namespace sim
