#include "sim/clock/clock.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "sim/places.h"

namespace sim {

namespace {

std::atomic<bool> on{false};

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

Clock& Clock::instance() {
  static auto* clock = new Clock();  // never destroyed: threads may outlive static destructors
  return *clock;
}

bool Clock::is_on() {
  return on.load(std::memory_order_relaxed);
}

void Clock::begin(Model model) {
  model_ = std::move(model);
  for (const char* kind : {"call", "event"}) seconds({kind, {}});
  on = true;
}

double Clock::seconds(const Work& work) {
  if (work.kind.empty()) return 0;
  const auto key = std::pair(work.kind, work.sizes);
  {
    const Lock lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end()) return found->second;
  }
  const double found = model_(work.kind, work.sizes);
  const Lock lock(mutex_);
  return known_[key] = found;
}

double Clock::host() {
  const Lock lock(mutex_);
  return host_;
}

void Clock::call(const char* kind) {
  const double taken = seconds({kind, {}});
  const Lock lock(mutex_);
  host_ += taken;
}

void Clock::host_until(double moment) {
  const Lock lock(mutex_);
  host_ = std::max(host_, moment);
}

void Clock::set_place(std::string place) {
  const Lock lock(mutex_);
  place_ = std::move(place);
}

void Clock::write_numbers(const void* at, std::vector<int64_t> numbers) {
  const Lock lock(mutex_);
  numbers_written_[at] = std::move(numbers);
}

std::vector<int64_t> Clock::take_numbers(const void* at) {
  const Lock lock(mutex_);
  const auto found = numbers_written_.extract(at);
  return found.empty() ? std::vector<int64_t>() : std::move(found.mapped());
}

std::string Clock::place() {
  const Lock lock(mutex_);
  return place_;
}

void Clock::keep_spans(bool keep) {
  const Lock lock(mutex_);
  keeps_ = keep;
}

std::vector<Span> Clock::take_spans() {
  const Lock lock(mutex_);
  return std::exchange(spans_, {});
}

std::string Clock::text(int number) {
  const Lock lock(mutex_);
  return texts_.at(number);
}

int Clock::number_of(const std::string& text) {
  const auto [found, is_new] = numbers_.try_emplace(text, static_cast<int>(texts_.size()));
  if (is_new) texts_.push_back(text);
  return found->second;
}

double Clock::take_link(const std::string& link, double from, double seconds) {
  auto& busy = links_[link];
  // Nobody asks for the past.
  while (!busy.empty() && busy.begin()->second <= host_) busy.erase(busy.begin());
  auto next = busy.upper_bound(from);
  double begin = next == busy.begin() ? from : std::max(from, std::prev(next)->second);
  for (; next != busy.end() && next->first < begin + seconds; ++next) begin = std::max(begin, next->second);
  if (seconds > 0) busy[begin] = begin + seconds;
  return begin;
}

void Clock::add(int64_t stream, double begin, double end, Spent spent, const std::string& name) {
  if (!keeps_ || end <= begin) return;
  spans_.push_back({stream, begin, end, spent, number_of(name), number_of(op_under_way(place_))});
}

double Timeline::begin_now(const char* call) {
  Clock& clock = Clock::instance();
  clock.call(call);
  const Lock lock(clock.mutex_);
  const double begin = std::max(now_, clock.host_);
  clock.add(stream_, now_, begin, Spent::kHost, "the host");
  return now_ = begin;
}

void Timeline::work(const std::string& name, const Work& work) {
  Clock& clock = Clock::instance();
  const double taken = clock.seconds(work);
  const Lock lock(clock.mutex_);
  const double begin = begin_now("call");
  now_ = begin + taken;
  clock.add(stream_, begin, now_, Spent::kWork, name);
  last_ = name;
}

void Timeline::until(double moment, const std::string& what, bool is_asked) {
  Clock& clock = Clock::instance();
  const Lock lock(clock.mutex_);
  const double begin = is_asked ? begin_now("event") : now_;
  if (moment <= begin) return;
  now_ = moment;
  clock.add(stream_, begin, now_, Spent::kWait, what);
  last_ = what;
}

double Timeline::transfer(const std::string& name, const Work& work, const std::string& link) {
  Clock& clock = Clock::instance();
  const double taken = clock.seconds(work);
  const Lock lock(clock.mutex_);
  const double asked = begin_now("call");
  const double begin = clock.take_link(link, asked, taken);
  clock.add(stream_, asked, begin, Spent::kWait, "the link " + link);
  now_ = begin + taken;
  clock.add(stream_, begin, now_, Spent::kWork, name);
  last_ = name;
  return now_;
}

void Timeline::go_on(const std::string& name, double seconds) {
  Clock& clock = Clock::instance();
  const Lock lock(clock.mutex_);
  const double begin = std::exchange(now_, now_ + seconds);
  clock.add(stream_, begin, now_, Spent::kWork, name);
}

double Timeline::store(double seconds, const std::string& link) {
  Clock& clock = Clock::instance();
  const Lock lock(clock.mutex_);
  return clock.take_link(link, now_, seconds) + seconds;
}

double Timeline::done() {
  Clock& clock = Clock::instance();
  const Lock lock(clock.mutex_);
  return std::max(now_, clock.host_);
}

std::string Timeline::last() {
  const Lock lock(Clock::instance().mutex_);
  return last_;
}

}  // namespace sim
