// The operators of torch on the devices. Shapes are computed on the host, from tensors without data (the Meta
// key); memory of the results is allocated there too; then the CPU's kernel is enqueued, which finds tensors
// over the same memory when the stream comes to it. No operation keeps memory alive: memory that is freed too
// early is not there, as on CUDA.
#include "sim/operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "sim/generator.h"
#include "sim/memory.h"
#include "sim/operator_work.h"
#include "sim/streams.h"

namespace sim {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// Tensors of the CPU over the memory of others, which they do not keep. Those of one storage share one here
// too, so that operators find what overlaps.
class Views {
 public:
  at::Tensor over(const at::Tensor& tensor) {
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    const c10::Storage& storage = tensor.storage();
    auto found = storages_.find(storage.unsafeGetStorageImpl());
    if (found == storages_.end()) {
      const auto bytes = static_cast<int64_t>(storage.nbytes());
      const at::Tensor memory = at::for_blob(const_cast<void*>(storage.data()), {bytes})
                                    .options(options.dtype(at::kByte))
                                    .target_device(at::kCPU)
                                    .make_tensor();
      found = storages_.emplace(storage.unsafeGetStorageImpl(), memory.storage()).first;
    }
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    return made;
  }

 private:
  std::map<const c10::StorageImpl*, c10::Storage> storages_;
};

}  // namespace

at::Tensor over(const at::Tensor& tensor) {
  return Views().over(tensor);
}

namespace {

at::Tensor without_data(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(at::kMeta).pinned_memory(false));
}

// `value` with every tensor changed, also those in lists.
template <class Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector())
      made.push_back(each.defined() ? change(each) : each);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector()) {
      made.push_back(each && each->defined() ? std::optional(change(*each)) : each);
    }
    return made;
  }
  return value;
}

template <class See>
void for_each_tensor(const IValue& value, const See& see) {
  changed(value, [&](const at::Tensor& tensor) {
    see(tensor);
    return tensor;
  });
}

// Returns a kernel's operand: device memory in place, numbers and indices of the host as they are now.
at::Tensor operand(const at::Tensor& tensor, Views& views) {
  return is_sim(tensor) ? views.over(tensor) : tensor.clone();
}

// Tensors of the host that an operation under way reads or writes. They end on a thread of the host: a
// stream's would need Python's lock, which the host may hold while it waits for that stream.
void keep(const at::Tensor& tensor, int device) {
  static auto* mutex = new std::mutex();
  static auto* kept = new std::deque<std::pair<Event, at::Tensor>>();
  std::vector<at::Tensor> over_now;
  Event used;
  used.record(current_queue(device));
  const std::lock_guard<std::mutex> lock(*mutex);
  while (!kept->empty() && kept->front().first.has_happened()) {
    over_now.push_back(std::move(kept->front().second));
    kept->pop_front();
  }
  kept->emplace_back(used, tensor);
}

// From a tensor of the host that nobody changes.
void copy_later(const at::Tensor& from, const at::Tensor& to) {
  if (from.numel() == 0 || from.const_data_ptr() == to.const_data_ptr()) return;
  enqueue(to.device().index(), "copy", [from, to = over(to)]() mutable { to.copy_(from); },
          {"copy from host", {static_cast<int64_t>(from.nbytes())}});
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{};
}

int device_of(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments) {
  int device = -1;
  const bool takes_indices =
      op.schema().name() == "aten::index" || op.schema().name() == "aten::_index_put_impl_";
  for (const IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!is_sim(tensor)) {
        TORCH_CHECK(tensor.dim() == 0 || takes_indices, op.schema().name(), ": a tensor on ", tensor.device(),
                    " with shape ", tensor.sizes(), " meets tensors on sim; move it there first.");
        return;
      }
      TORCH_CHECK(device < 0 || device == tensor.device().index(), op.schema().name(),
                  ": tensors on sim:", device, " and on ", tensor.device(), ".");
      device = tensor.device().index();
    });
    if (argument.isDevice() && argument.toDevice().type() == kSim && argument.toDevice().has_index()) {
      device = argument.toDevice().index();
    }
  }
  return device < 0 ? current_device() : device;
}

// ----------------------------------------------------------------------------------------- the fallback

// The shapes of what these give are among the values, or what they give are numbers: the host waits.
bool depends_on_values(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments) {
  static const std::set<std::string> kNames = {
      "aten::nonzero",    "aten::masked_select",      "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
      "aten::bincount",   "aten::repeat_interleave",  "aten::_local_scalar_dense",
      "aten::histc"};
  const std::string& name = op.schema().name();
  if (kNames.count(name) > 0) return true;
  if (name != "aten::index" && name != "aten::_index_put_impl_") return false;
  // One number in all places of a mask: CUDA fills them without the host.
  if (name == "aten::_index_put_impl_" && arguments[2].toTensor().numel() == 1) return false;
  bool has_mask = false;
  for_each_tensor(arguments[1], [&](const at::Tensor& index) {
    has_mask = has_mask || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  });
  return has_mask;
}

struct Below {  // autograd, which has seen the operator
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
};

// Replaces the arguments on `stack` by what the operator returns.
void give(Stack* stack, size_t arguments, std::vector<IValue> results) {
  torch::jit::drop(*stack, arguments);
  for (IValue& each : results) stack->push_back(std::move(each));
}

at::Tensor like(const at::Tensor& tensor, int device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(c10::Device(kSim, device)).pinned_memory(false));
}

// Gives a tensor that an operator has written the shape that it is to have.
void reshape_written(const at::Tensor& written, const at::Tensor& wanted) {
  if (!is_sim(written) || written.sizes() == wanted.sizes()) return;
  written.resize_(wanted.sizes());
  if (!wanted.is_contiguous()) written.as_strided_(wanted.sizes(), wanted.strides());
}

// The input that a result is, where it is one that was written.
std::optional<size_t> written_input(const c10::FunctionSchema& schema, size_t result) {
  const c10::AliasInfo* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return std::nullopt;
  TORCH_CHECK(alias->isWrite(), schema.name(),
              " gives a view, for which the simulated device has no kernel.");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* of_input = schema.arguments()[i].alias_info();
    if (of_input != nullptr && of_input->beforeSets() == alias->beforeSets()) return i;
  }
  TORCH_CHECK(false, schema.name(), ": a result is written that is no argument.");
}

// CUDA's kernel counts integers too, and the CPU's only floating-point numbers.
void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const bool counts = op.schema().name() == "aten::histc";
  const at::ScalarType dtype = counts ? stack->front().toTensor().scalar_type() : at::kFloat;
  if (!counts || at::isFloatingType(dtype)) return op.callBoxed(stack);
  stack->front() = stack->front().toTensor().to(at::kDouble);
  op.callBoxed(stack);
  stack->front() = stack->front().toTensor().to(dtype);
}

// The operator runs on the stream, and the host waits for it to see the shapes of what it gives.
void run_and_wait(const c10::OperatorHandle& op, Stack* stack, size_t count, int device) {
  HostWaits::count(op.schema().name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !Clock::is_on(), op.schema().name(),
      " gives as much as the values say, and in virtual time no values are computed.");
  const auto arguments = torch::jit::last(*stack, count);
  const auto on_cpu = std::make_shared<Stack>();
  Views views;
  for (const IValue& each : arguments) {
    on_cpu->push_back(changed(each, [&](const at::Tensor& t) { return operand(t, views); }));
  }
  const auto given = std::make_shared<Stack>(*on_cpu);
  enqueue(device, op.schema().name(), [op, on_cpu] {
    const Below below;
    call_on_cpu(op, on_cpu.get());
  });
  current_queue(device).synchronize();
  const Below below;
  std::vector<IValue> results;
  for (size_t r = 0; r < on_cpu->size(); ++r) {
    const IValue& result = (*on_cpu)[r];
    if (const auto input = written_input(op.schema(), r)) {
      if (arguments[*input].isTensor()) {
        reshape_written(arguments[*input].toTensor(), result.toTensor());
        copy_later(result.toTensor(), arguments[*input].toTensor());
      }
      results.push_back(arguments[*input]);
      continue;
    }
    results.push_back(changed(result, [&](const at::Tensor& tensor) {
      at::Tensor made = like(tensor, device);
      copy_later(tensor, made);
      return made;
    }));
  }
  give(stack, count, std::move(results));
}

// A generator for one call, where the operator draws random numbers.
std::optional<IValue> drawn(const c10::Argument& parameter, const IValue& argument, int device) {
  const auto type = parameter.type()->kind() == c10::TypeKind::OptionalType
                        ? parameter.type()->castRaw<c10::OptionalType>()->getElementType()
                        : parameter.type();
  if (type->kind() != c10::TypeKind::GeneratorType) return std::nullopt;
  const at::Generator generator = argument.isNone() ? default_generator(device) : argument.toGenerator();
  TORCH_CHECK(generator.device().type() == kSim, "A generator on ", generator.device(),
              " was given for a tensor on sim.");
  auto* own = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  const std::lock_guard<std::mutex> lock(own->mutex_);
  return own->next();
}

// CUDA's kernels of these compute in float32 whatever they are given, and so are the statistics that they
// keep for the backward pass; the CPU's keep those of bfloat16 in bfloat16, and round halves of sums up.
bool computes_in_float(const c10::OperatorHandle& op) {
  static const std::set<std::string> kNames = {"aten::native_layer_norm", "aten::native_layer_norm_backward",
                                               "aten::_embedding_bag_forward_only"};
  return kNames.count(op.schema().name()) > 0;
}

IValue in_float(const IValue& value) {
  return changed(value, [](const at::Tensor& tensor) {
    return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor;
  });
}

void run_later(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(schema.name().rfind("aten::", 0) == 0 || schema.name().rfind("prims::", 0) == 0,
                              schema.name(),
                              " has no kernel for the simulated device, as it has none for CUDA.");
  const size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const int device = device_of(op, arguments);
  raise_if_broken();
  const c10::OptionalDeviceGuard guard(c10::Device(kSim, device));
  if (depends_on_values(op, arguments)) return run_and_wait(op, stack, count, device);

  const Below below;
  Stack shapes, later;
  for (size_t i = 0; i < count; ++i) {
    const IValue& each = arguments[i];
    if (each.isDevice()) {
      shapes.emplace_back(c10::Device(at::kMeta));
      later.emplace_back(c10::Device(at::kCPU));
    } else if (const auto generator = drawn(schema.arguments()[i], each, device)) {
      shapes.emplace_back();
      later.push_back(*generator);
    } else {
      shapes.push_back(changed(each, [](const at::Tensor& t) { return is_sim(t) ? without_data(t) : t; }));
      later.push_back(each);
    }
  }
  const Stack given = shapes;  // what is written gets its size here
  op.callBoxed(&shapes);

  std::vector<IValue> results;
  for (size_t r = 0; r < shapes.size(); ++r) {
    if (const auto input = written_input(schema, r)) {
      if (arguments[*input].isTensor() && given[*input].isTensor()) {
        reshape_written(arguments[*input].toTensor(), given[*input].toTensor());
      }
      results.push_back(arguments[*input]);
      continue;
    }
    results.push_back(changed(shapes[r], [&](const at::Tensor& shape) { return like(shape, device); }));
  }
  if (Clock::is_on()) {
    enqueue(device, schema.name(), [] {}, work_of(schema, arguments, results));
    return give(stack, count, std::move(results));
  }
  // Views of memory only now: what is written may have been moved.
  Views views;
  for (IValue& each : later) each = changed(each, [&](const at::Tensor& t) { return operand(t, views); });
  std::vector<std::vector<at::Tensor>> into;  // by result; none for what the operator writes itself
  for (size_t r = 0; r < results.size(); ++r) {
    into.emplace_back();
    if (schema.returns()[r].alias_info() != nullptr) continue;
    for (const at::Tensor& each : tensors_of(results[r])) {
      into.back().push_back(each.defined() ? over(each) : each);
    }
  }
  enqueue(device, schema.name(), [op, later = std::move(later), into = std::move(into)]() mutable {
    const Below below;
    if (computes_in_float(op)) {
      for (IValue& each : later) each = in_float(each);
    }
    op.callBoxed(&later);
    for (size_t r = 0; r < into.size(); ++r) {
      const std::vector<at::Tensor> made = tensors_of(later[r]);
      for (size_t i = 0; i < into[r].size(); ++i) {
        if (!into[r][i].defined() || !made.at(i).defined()) continue;
        if (r > 0 && op.schema().name() == "aten::_embedding_bag_forward_only") {
          continue;  // nobody reads what else it gives, which has other shapes on CPUs
        }
        TORCH_CHECK(into[r][i].sizes() == made[i].sizes(), "shapes said ", into[r][i].sizes(),
                    ", the kernel gave ", made[i].sizes());
        into[r][i].copy_(made[i]);
      }
    }
  });
  give(stack, count, std::move(results));
}

// ------------------------------------------------------------------------------------ memory and copies

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device> device,
                               std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = (self.numel() + self.storage_offset()) * self.dtype().itemsize();
  if (self.numel() > 0 && needed > self.storage().nbytes()) {
    const c10::OptionalDeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// The host is given zeros for losses, norms and flags. Of integers it computes shapes, so they are what a
// launch has written to `from`, or what the clock was told for their sizes, or refused.
void fill_for_host(const at::Tensor& tensor, const void* from) {
  const bool is_flag = tensor.scalar_type() == at::kByte || tensor.scalar_type() == at::kBool;
  if (is_flag || !at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    tensor.zero_();
    return;
  }
  const std::vector<int64_t> written = Clock::instance().take_numbers(from);
  if (static_cast<int64_t>(written.size()) == tensor.numel() && !written.empty()) {
    tensor.copy_(at::tensor(written, at::kLong).view(tensor.sizes()));
    return;
  }
  const auto value = Clock::instance().integers_of(tensor.sizes().vec());
  TORCH_CHECK_NOT_IMPLEMENTED(value, "The host reads integers of a device, shape ", tensor.sizes(),
                              ", and in virtual time no values are computed; tell it what it asks for, as "
                              "`rows` of an op.");
  tensor.fill_(*value);
}

at::Tensor copy_in_virtual_time(const at::Tensor& self, const at::Tensor& dst, const char* name,
                                bool goes_on) {
  const bool is_inside = is_sim(self) && is_sim(dst);
  const auto bytes = static_cast<int64_t>(self.numel() * (self.element_size() + dst.element_size()));
  const int device = is_sim(self) ? self.device().index() : dst.device().index();
  enqueue(device, name, [] {}, is_inside ? memory_work(bytes) : Work{name, {bytes / 2}});
  if (dst.device().is_cpu()) {
    fill_for_host(dst, self.const_data_ptr());
  }
  if (is_inside || goes_on) return dst;
  HostWaits::count(name);
  current_queue(device).synchronize();
  return dst;
}

// As cudaMemcpyAsync: the host goes on only where its memory is pinned and it asked not to wait.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const Below below;
  raise_if_broken();
  const bool to_host = dst.device().is_cpu(), from_host = self.device().is_cpu();
  const int device = to_host ? self.device().index() : dst.device().index();
  const c10::OptionalDeviceGuard guard(c10::Device(kSim, device));
  const bool goes_on = non_blocking && (!from_host || self.is_pinned()) && (!to_host || dst.is_pinned());
  const char* name = to_host ? "copy to host" : from_host ? "copy from host" : "copy";
  if (Clock::is_on()) return copy_in_virtual_time(self, dst, name, goes_on || (from_host && non_blocking));
  if (from_host && !goes_on && non_blocking) {
    copy_later(self.clone(), dst);  // pageable memory is read before the call returns
  } else if (from_host || to_host) {
    enqueue(device, name, [from = over(self), to = over(dst)]() mutable { to.copy_(from); });
    if (goes_on) {
      keep(from_host ? self : dst, device);
    } else {
      HostWaits::count(name);
      current_queue(device).synchronize();
    }
  } else {
    TORCH_CHECK(self.device() == dst.device(), "A copy from ", self.device(), " to ", dst.device(),
                ": the simulated devices of a process do not reach each other.");
    enqueue(device, name, [from = over(self), to = over(dst)]() mutable { to.copy_(from); });
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const Below below;
  HostWaits::count("item");
  current_queue(self.device().index()).synchronize();
  if (Clock::is_on()) {
    const at::Tensor value = at::empty({}, at::TensorOptions().dtype(self.scalar_type()));
    fill_for_host(value, self.const_data_ptr());
    return value.item();
  }
  const OpenMemory open;
  return over(self).item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// By its definition, of operators that take a generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0), mask};
}

// CUDA's GEMM of 16-bit operands with a sum in fp32, which CPUs have not.
at::Tensor& addmm_in_float(const at::Tensor& self, const at::Tensor& a, const at::Tensor& b,
                           at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
                           at::Tensor& out) {
  TORCH_CHECK(at::isReducedFloatingType(a.scalar_type()) && a.scalar_type() == b.scalar_type(),
              "addmm to another dtype takes two 16-bit operands of one dtype, as on CUDA; got ",
              a.scalar_type(), " and ", b.scalar_type(), ".");
  TORCH_CHECK(dtype == at::kFloat && out.scalar_type() == dtype && self.is_same(out),
              "addmm to another dtype has float32 here, written over what is added to.");
  const bool reads = beta.toDouble() != 0;
  Work work{"gemm", {a.size(0), b.size(1), a.size(1), 1, a.element_size(), reads ? 8 : 4}};
  enqueue(
      out.device().index(), "aten::addmm",
      [a = over(a), b = over(b), to = over(out), beta, alpha, reads]() mutable {
        const Below below;
        if (!reads) to.zero_();  // whatever was there
        to.addmm_(a.to(at::kFloat), b.to(at::kFloat), beta, alpha);
      },
      std::move(work));
  return out;
}

// As on a GPU that multiplies bf16 in one launch, and other dtypes by torch's composition, for which the host
// reads the ends of groups.
void grouped_mm(const c10::OperatorHandle& op, Stack* stack) {
  const at::Tensor& rows = (*stack)[stack->size() - op.schema().arguments().size()].toTensor();
  if (rows.scalar_type() == at::kBFloat16) return run_later(op, stack);
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_later>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("addmm.dtype_out", TORCH_FN(addmm_in_float));
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&grouped_mm>());
  // Not by torch's composition of other operators, whose statistics are of the input's dtype.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_later>());
}

}  // namespace
}  // namespace sim
