#include "core/ledger/ledger.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <pthread.h>
#include <utility>

#include "core/ledger/stream_clock.h"

namespace pyruntime {

namespace {

// The layer and operator that this thread computes now.
struct Computing {
  int64_t told = 0;  // the ledger, by number, whose callbacks this thread takes
  int task = -1;     // the engine's, while is_backward
  int32_t layer = 0;
  uint64_t first = 0, noted = 0;  // the layers of sequence numbers first <= n < noted are known
  int operators_deep = 0;
  // The outermost operator's:
  double begin = 0;
  int32_t name = 0;
  int32_t layer_of_operator = 0;
  bool is_of_engine = false;  // the engine's own operator, around a node
  bool is_quiet = false;      // no callbacks for the operators that it calls
  // While the engine runs, the outermost operator is a node, from its begin to that of the next.
  bool is_backward = false;
  int nodes_deep = 0;
};

thread_local Computing computing;

// The records of a ledger that is on.
struct Recorded {
  int64_t ledger = 0;  // its number
  c10::Device device = c10::kCPU;
  uint64_t thread = 0;  // that started it, by torch's number
  const Computing* of_thread = nullptr;
  const int32_t* layers = nullptr;  // by sequence number
};

Recorded& recorded() {
  static Recorded instance;
  return instance;
}

bool is_told() {
  return computing.told != 0 && computing.told == recorded().ledger;
}

double now() {
  return moment(recorded().device);
}

// Callbacks of operators and of autograd's nodes. torch also calls back for every operator inside an
// operator, which costs more than all else here. So the callback is disabled while one of our operators runs
// and while the engine does, which would also invent names for its own operators.
at::CallbackHandle operators = 0, nodes = 0;

int32_t this_thread() {
  static std::atomic<int32_t> threads{0};
  thread_local const int32_t number = threads.fetch_add(1);
  return number;
}

// The layers of the last kSequences operators that autograd will run backward, by their sequence numbers.
constexpr size_t kSequences = size_t{1} << 17;

std::array<int32_t, kSequences>& layers_by_sequence() {
  thread_local auto* layers = new std::array<int32_t, kSequences>();  // 512 KiB, where a ledger was started
  return *layers;
}

// Operators called since the last time belong to the current layer.
void note_sequences() {
  const uint64_t now = at::sequence_number::peek();
  if (now - computing.noted > kSequences) computing.noted = now - kSequences;
  for (; computing.noted < now; ++computing.noted) {
    layers_by_sequence()[computing.noted % kSequences] = computing.layer;
  }
}

// The layer of an autograd node: that of its operator in the forward pass, whose thread has numbered it.
int32_t layer_of(const at::RecordFunction& node) {
  const auto sequence = static_cast<uint64_t>(node.seqNr());
  const bool is_of_starter = node.forwardThreadId() == recorded().thread;
  const Computing& by = is_of_starter ? *recorded().of_thread : computing;
  const int32_t* layers = is_of_starter ? recorded().layers : layers_by_sequence().data();
  const bool is_known = sequence >= by.first && sequence < by.noted && sequence + kSequences >= by.noted;
  return is_known ? layers[sequence % kSequences] : 0;
}

struct LayerBefore : at::ObserverContext {
  explicit LayerBefore(int32_t layer) : layer(layer) {}
  int32_t layer;
};

// Enters the outermost operator, or its part since the last interruption.
void enter_operator() {
  LedgerEntry entry{Entered::kOp};
  entry.name = computing.name;
  entry.layer = computing.layer_of_operator;
  entry.begin = entry.wanted = computing.begin;
  entry.end = computing.begin = now();
  if (entry.begin != 0 && entry.end != 0) Ledger::instance().enter(entry);
}

bool begins_with(const char* name, std::string_view prefix) {
  return std::string_view(name).substr(0, prefix.size()) == prefix;
}

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& op) {
  if (!Ledger::is_on() || !is_told() || computing.operators_deep++ > 0) return nullptr;
  const char* name = op.name();
  computing.name = Ledger::instance().number_of(name);
  computing.layer_of_operator = computing.layer;
  computing.is_of_engine = begins_with(name, "autograd::engine::");
  computing.begin = now();
  computing.is_quiet = begins_with(name, "pyruntime::");
  if (computing.is_quiet) at::disableCallback(operators);
  return nullptr;
}

void operator_ends(const at::RecordFunction& /*op*/, at::ObserverContext* /*context*/) {
  // The operator around the first node ends within the backward pass. An operator that began before the
  // ledger was switched on is not entered.
  if (!is_told() || computing.is_backward || computing.operators_deep == 0) return;
  if (--computing.operators_deep > 0) return;
  if (std::exchange(computing.is_quiet, false)) at::reenableCallback(operators);
  enter_operator();
}

void backward_ends() {
  if (!std::exchange(computing.is_backward, false)) return;
  enter_operator();
  computing.operators_deep = 0;
  if (recorded().device.is_cpu()) at::reenableCallback(operators);
}

void backward_begins() {
  computing.is_backward = true;
  computing.task = torch::autograd::get_current_graph_task_id();
  computing.operators_deep = 1;
  computing.begin = now();
  // For all threads; and the thread at the end, which enables it again, may be another one of the engine's.
  if (recorded().device.is_cpu()) at::disableCallback(operators);
  torch::autograd::Engine::get_default_engine().queue_callback([] { backward_ends(); });
}

// Tells this thread, which is the engine's for a device.
void tell() {
  computing = {};
  computing.told = recorded().ledger;
  computing.first = computing.noted = at::sequence_number::peek();
}

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& node) {
  if (!Ledger::is_on()) return nullptr;
  if (!is_told() && recorded().device.is_cpu()) return nullptr;
  if (!is_told()) tell();
  note_sequences();
  auto before = std::make_unique<LayerBefore>(computing.layer);
  // Nodes that add up gradients have no number; they belong to the layer around them.
  if (node.seqNr() >= 0) computing.layer = layer_of(node);
  // A pass that an operator runs belongs to that operator.
  const bool is_outermost = computing.nodes_deep++ == 0;
  const bool is_first = computing.is_backward ? computing.task != torch::autograd::get_current_graph_task_id()
                                              : computing.operators_deep == 0 || computing.is_of_engine;
  if (is_outermost && is_first) {
    backward_begins();
  } else if (is_outermost && computing.is_backward) {
    enter_operator();
  }
  if (is_outermost && computing.is_backward) {
    computing.name = Ledger::instance().number_of(node.name());
    computing.layer_of_operator = computing.layer;
  }
  return before;
}

void node_ends(const at::RecordFunction& /*node*/, at::ObserverContext* context) {
  if (context == nullptr || computing.nodes_deep == 0) return;
  note_sequences();
  computing.layer = static_cast<LayerBefore*>(context)->layer;
  --computing.nodes_deep;
}

// The numbers of names that this thread has looked up, by their first and last letters and length. This is
// quick, and names that share a place only take turns in it.
struct Known {
  std::string name;
  int32_t number = 0;
};

Known& known_by(std::string_view name) {
  thread_local std::array<Known, 1024> known;
  uint64_t first = 0, last = 0;
  const size_t count = std::min(name.size(), sizeof(first));
  std::memcpy(&first, name.data(), count);
  std::memcpy(&last, name.data() + name.size() - count, count);
  return known[((first * 31 ^ last) + name.size()) * 0x9E3779B97F4A7C15 >> 54];
}

}  // namespace

Ledger::Ledger() : names_{""}, numbers_{{"", 0}} {}

Ledger& Ledger::instance() {
  static auto* ledger = new Ledger();  // never destroyed: threads may outlive static destructors
  return *ledger;
}

int32_t Ledger::start(size_t capacity, c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!is_on(),
              "The ledger of this process is on already; leave its `with` block before starting another.");
  entries_.clear();
  entries_.reserve(capacity);
  capacity_ = capacity;
  lost_ = 0;
  // A forked child has none of the threads, and inherits the lock as one of them may have held it.
  [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { on_ = false; });
  recorded() = {recorded().ledger + 1, device, at::RecordFunction::currentThreadId(), &computing,
                layers_by_sequence().data()};
  thread_ = this_thread();
  tell();
  operators = at::addGlobalCallback(
      at::RecordFunctionCallback(operator_begins, operator_ends).scopes({at::RecordScope::FUNCTION}));
  nodes = at::addGlobalCallback(
      at::RecordFunctionCallback(node_begins, node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  on_ = true;
  return thread_;
}

void Ledger::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_on()) return;
  on_ = false;
  computing.told = 0;
  at::removeCallback(operators);
  at::removeCallback(nodes);
}

Ledger::Taken Ledger::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Taken taken{entries_, std::exchange(lost_, 0)};  // the memory stays
  entries_.clear();
  if (!is_on()) entries_ = {};
  return taken;
}

std::vector<std::string> Ledger::names() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return names_;
}

void Ledger::enter(LedgerEntry entry) {
  entry.thread = entry.begin < 0 ? thread_ : this_thread();
  if (entry.kind != Entered::kOp) entry.layer = computing.layer;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_on()) return;
  if (entries_.size() == capacity_) {
    ++lost_;
  } else {
    entries_.push_back(entry);
  }
}

int32_t Ledger::number_of(std::string_view name) {
  Known& known = known_by(name);
  if (known.name == name) return known.number;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = numbers_.find(name);
  if (found == numbers_.end()) {
    names_.emplace_back(name);
    found = numbers_.emplace(name, static_cast<int32_t>(names_.size()) - 1).first;
  }
  known = {std::string(name), found->second};
  return found->second;
}

int32_t Ledger::set_layer(int32_t layer) {
  if (is_told() && is_on()) {
    // Modules are called in a node, or after the engine failed and runs no more.
    if (computing.is_backward && computing.nodes_deep == 0) backward_ends();
    note_sequences();
  }
  return std::exchange(computing.layer, layer);
}

int32_t Ledger::layer() {
  return computing.layer;
}

LedgerOperator::LedgerOperator(const char* name, int32_t layer) : is_on_(Ledger::is_on()) {
  if (!is_on_) return;
  if (computing.operators_deep++ > 0) {
    enter_operator();
  } else {
    computing.begin = now();
  }
  outer_name_ = std::exchange(computing.name, Ledger::instance().number_of(name));
  outer_layer_ = std::exchange(computing.layer_of_operator, layer);
}

LedgerOperator::~LedgerOperator() {
  if (!is_on_) return;
  enter_operator();
  --computing.operators_deep;
  computing.name = outer_name_;
  computing.layer_of_operator = outer_layer_;
}

}  // namespace pyruntime
