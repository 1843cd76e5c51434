#include "ops/weight_gradient.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/ledger/ledger.h"
#include "ops/gemm/gemm.h"

namespace pyruntime {

namespace {

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  WeightGradientSink sink;
  bool keeps;
};

using Key = std::pair<const c10::StorageImpl*, int64_t>;

struct Sinks {
  std::mutex mutex;
  std::map<Key, Entry> by_weight;
};

Sinks& sinks() {
  static auto* instance = new Sinks();  // never destroyed: a sink may hold what outlives static destructors
  return *instance;
}

Key key_of(const at::Tensor& weight) {
  return {weight.storage().unsafeGetStorageImpl(), weight.storage_offset()};
}

// Whether the backward pass that runs gives the gradient to someone other than the sink: to a caller of
// torch.autograd.grad() or backward(inputs=...), or to a hook of the weight.
bool is_asked_for(const at::Tensor& weight) {
  if (torch::autograd::get_current_graph_task_id() < 0) return false;
  if (!torch::autograd::get_current_graph_task_exec_info()->empty()) return true;
  return weight.is_leaf() && weight.requires_grad() &&
         !torch::autograd::impl::grad_accumulator(weight)->tensor_pre_hooks().empty();
}

// The weight's sink; nothing if it has none.
std::optional<Entry> entry_of(const at::Tensor& weight) {
  // Tensors that torch.compile traces with have no memory to identify them by.
  if (!weight.has_storage() || weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return {};
  Sinks& all = sinks();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_weight.find(key_of(weight));
  if (found == all.by_weight.end()) return {};
  // Another tensor may have taken the memory of a former weight.
  if (found->second.storage.expired() || is_asked_for(weight)) return {};
  return found->second;
}

}  // namespace

void set_weight_gradient_sink(const at::Tensor& weight, WeightGradientSink sink, bool keeps) {
  Sinks& all = sinks();
  WeightGradientSink before;  // destroyed without the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.by_weight, [](const auto& entry) { return entry.second.storage.expired(); });
  const auto found = all.by_weight.find(key_of(weight));
  if (found != all.by_weight.end()) {
    before = std::move(found->second.sink);
    all.by_weight.erase(found);
  }
  if (sink) {
    all.by_weight.emplace(key_of(weight),
                          Entry{weight.storage().getWeakStorageImpl(), std::move(sink), keeps});
  }
}

bool has_weight_gradient_sink(const at::Tensor& weight) {
  return entry_of(weight).has_value();
}

bool has_sink_that_keeps(const at::Tensor& weight) {
  const std::optional<Entry> found = entry_of(weight);
  return found && found->keeps;
}

at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& dy, const at::Tensor& x,
                           bool in_pieces) {
  if (const std::optional<Entry> found = entry_of(weight)) {
    found->sink(as_matrix(dy), as_matrix(x), /*later=*/in_pieces && weight.device().is_cpu(), {});
    return {};
  }
  if (!in_pieces) return linear_wgrad(dy, x);
  at::Tensor out = at::empty({dy.size(2), x.size(2)}, x.options());
  write_in_pieces(out, as_matrix(dy.contiguous()), as_matrix(x.contiguous()), /*accumulate=*/false);
  return out;
}

void write_stack(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, const Ends& ends,
                 bool accumulate) {
  int64_t begin = 0;
  for (int64_t matrix = 0; matrix < out.size(0); ++matrix) {
    const int64_t rows = ends.at(matrix) - begin;
    WeightGradientGemm(dy.narrow(0, begin, rows), x.narrow(0, begin, rows))
        .write(out.select(0, matrix), 0, accumulate);
    begin += rows;
  }
}

at::Tensor stack_gradient(const at::Tensor& stack, const at::Tensor& dy, const at::Tensor& x,
                          const Ends& ends, const at::Tensor& sum) {
  if (const std::optional<Entry> found = entry_of(stack)) {
    found->sink(dy, x, /*later=*/false, ends);
    return {};
  }
  if (multiplies_groups(stack)) {
    const at::Tensor term = gradients_of_groups(dy, x, ends_on(dy.device(), ends));
    return sum.defined() ? sum.add_(term) : term;
  }
  const at::Tensor out = sum.defined() ? sum : at::empty(stack.sizes(), stack.options());
  write_stack(out, dy, x, ends, /*accumulate=*/sum.defined());
  return out;
}

// --- pieces

namespace {

// Writes the piece that begins with row `first` of `out`, a sum over `depth` rows; returns its end.
int64_t write_piece(const at::Tensor& out, const WeightGradientGemm& gemm, int64_t depth, bool accumulate,
                    int64_t first) {
  const int64_t n = out.size(0);
  // On a device streams wait, not this thread.
  const int64_t most = out.device().is_cpu() ? rows_of_piece(depth, n, out.size(1)) : n;
  const int64_t rows = std::min(most, n - first);
  gemm.write(out.narrow(0, first, rows), first, accumulate);
  return first + rows;
}

}  // namespace

void write_in_pieces(const at::Tensor& out, const at::Tensor& dy, const at::Tensor& x, bool accumulate) {
  const WeightGradientGemm gemm(dy, x);
  for (int64_t first = 0; first < out.size(0);) {
    first = write_piece(out, gemm, dy.size(0), accumulate, first);
  }
}

// --- products multiplied in waits

std::shared_ptr<WeightProduct> WeightProduct::make(const at::Tensor& out, bool accumulate, const char* name) {
  std::shared_ptr<WeightProduct> product(new WeightProduct(out, accumulate, name));
  WaitQueue::of_this_thread().add(product);
  return product;
}

WeightProduct::WeightProduct(const at::Tensor& out, bool accumulate, const char* name)
    : out_(out), name_(name), layer_(Ledger::layer()), has_sum_(accumulate) {}

void WeightProduct::add(const at::Tensor& dy, const at::Tensor& x) {
  operands_.emplace_back(dy.contiguous(), x.contiguous());
}

int64_t WeightProduct::bytes() const {
  int64_t bytes = 0;
  for (const auto& [dy, x] : operands_) bytes += static_cast<int64_t>(dy.nbytes() + x.nbytes());
  return bytes;
}

bool WeightProduct::multiply() {
  if (operands_.empty()) return false;
  const LedgerOperator computing(name_, layer_);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& [dy, x] = operands_.front();
  if (out_.size(0) > 0) {
    if (!gemm_) gemm_.emplace(dy, x);
    next_row_ = write_piece(out_, *gemm_, dy.size(0), has_sum_, next_row_);
  }
  if (next_row_ < out_.size(0)) return true;
  gemm_.reset();
  operands_.pop_front();
  next_row_ = 0;
  has_sum_ = true;
  return true;
}

// Older products that write to the same memory go first.
void WeightProduct::finish() {
  const std::vector<std::shared_ptr<Piecework>> queued = WaitQueue::of_this_thread().products();
  for (const std::shared_ptr<Piecework>& each : queued) {
    if (each.get() == this) break;
    auto* before = dynamic_cast<WeightProduct*>(each.get());
    if (before == nullptr || before->out().data_ptr() != out_.data_ptr()) continue;
    while (before->multiply()) continue;
  }
  while (multiply()) continue;
}

// --- gradients that come later

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The most bytes of operands that wait in one pass; beyond it the oldest products are multiplied at once.
constexpr int64_t kMostBytes = int64_t{512} << 20;

// Makes autograd accumulate a gradient: its backward returns the gradient.
struct Accumulate : torch::autograd::Function<Accumulate> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, at::Tensor* gradient) {
    ctx->saved_data["gradient"] = std::move(*gradient);
    return at::empty({}, weight.options());
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& /*of the empty scalar*/) {
    // The only reference, so that autograd keeps the tensor itself instead of a copy.
    variable_list gradients(2);
    gradients[0] = std::move(ctx->saved_data["gradient"]).toTensor();
    return gradients;
  }
};

// A weight's gradient that autograd will get.
struct Gradient {
  at::Tensor weight;
  std::shared_ptr<WeightProduct> product;
  bool has_all = false;  // all of its operands

  bool is_done() const { return has_all && !product->has_operands(); }
  // Called once it is done.
  void accumulate() {
    if (!weight.requires_grad()) return;  // frozen meanwhile
    at::Tensor sum = product->out();
    product.reset();
    const at::AutoGradMode on(true);
    torch::autograd::backward({Accumulate::apply(weight, &sum)});
  }
};

// One run of autograd's engine, owned by its callback, so that it ends when the run does, in any way.
struct Pass {
  int task = torch::autograd::get_current_graph_task_id();
  std::unordered_map<const Node*, int> uses;  // of leaves in the graph
  std::deque<Gradient> gradients;             // oldest first

  void count_uses(const Node& node) {
    for (const auto& edge : node.next_edges()) {
      if (edge.function != nullptr && edge.function->next_edges().empty()) ++uses[edge.function.get()];
    }
  }

  bool multiply() {
    return std::ranges::any_of(gradients,
                               [](const Gradient& gradient) { return gradient.product->multiply(); });
  }

  void accumulate_finished() {
    while (!gradients.empty() && gradients.front().is_done()) {
      Gradient finished = std::move(gradients.front());
      gradients.pop_front();
      finished.accumulate();
    }
  }

  void finish() {
    while (multiply()) continue;
    accumulate_finished();
  }

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Gradient& gradient : gradients) bytes += gradient.product->bytes();
    return bytes;
  }
};

// The pass that runs now in this thread.
Pass& this_pass() {
  // More than one only if a backward pass runs inside another.
  static thread_local std::vector<std::weak_ptr<Pass>> passes;
  std::erase_if(passes, [](const auto& pass) { return pass.expired(); });
  const int task = torch::autograd::get_current_graph_task_id();
  for (const std::weak_ptr<Pass>& weak : passes) {
    if (const auto pass = weak.lock(); pass->task == task) return *pass;
  }
  const auto pass = std::make_shared<Pass>();
  for (const Node* node : *torch::autograd::get_current_graph_task_nodes_in_graph()) pass->count_uses(*node);
  torch::autograd::Engine::get_default_engine().queue_callback([pass] { pass->finish(); });
  passes.push_back(pass);
  return *pass;
}

// Whether it has a parameter's real memory, and is no stand-in.
bool is_plain_leaf(const at::Tensor& weight) {
  return weight.device().is_cpu() && weight.is_leaf() && weight.has_storage() &&
         !weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !weight.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

}  // namespace

bool may_come_later(const at::Tensor& weight) {
  if (torch::autograd::get_current_graph_task_id() < 0 || !is_plain_leaf(weight)) return false;
  if (!weight.requires_grad()) return false;  // frozen since its forward
  if (!torch::autograd::get_current_graph_task_exec_info()->empty()) return false;
  if (has_weight_gradient_sink(weight)) return false;
  const auto node = torch::autograd::get_current_node();
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  if (!node->post_hooks().empty() || !accumulator->pre_hooks().empty() ||
      !accumulator->post_hooks().empty() || !accumulator->tensor_pre_hooks().empty() ||
      accumulator->tensor_post_acc_grad_hooks())
    return false;
  Pass& pass = this_pass();
  // torch leaves the root out of the nodes of its graph.
  if (!torch::autograd::get_current_graph_task_nodes_in_graph()->contains(node.get()) &&
      !pass.uses.contains(node.get())) {
    pass.count_uses(*node);
    pass.uses[node.get()] = 0;
  }
  return pass.uses[accumulator.get()] == 1;
}

void multiply_later(const at::Tensor& weight, const char* name, const at::Tensor& dy, const at::Tensor& x,
                    bool last) {
  Pass& pass = this_pass();
  pass.accumulate_finished();
  // The weight has one use in a pass.
  auto gradient =
      std::ranges::find_if(pass.gradients, [&](const Gradient& each) { return each.weight.is_same(weight); });
  if (gradient == pass.gradients.end()) {
    const at::Tensor sum = at::empty(weight.sizes(), weight.options());
    pass.gradients.push_back({weight, WeightProduct::make(sum, /*accumulate=*/false, name)});
    gradient = std::prev(pass.gradients.end());
  }
  gradient->product->add(as_matrix(dy), as_matrix(x));
  gradient->has_all = last;
  while (pass.bytes() > kMostBytes && pass.multiply()) continue;
}

}  // namespace pyruntime
