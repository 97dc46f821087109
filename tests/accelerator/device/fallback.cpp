#include "fallback.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <set>

#include "generator.h"
#include "memory.h"

namespace pretend {
namespace {
using torch::jit::Stack;

std::mutex unshaped_mutex;
std::set<std::string> unshaped_names;

// Operations that take tensors of the host beside those of the device, as CUDA's kernels do.
bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index",         "aten::index_put",         "aten::index_put_",          "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};
  return names.count(name) > 0;
}

// A number of Python stays one: it counts less than a tensor when types are promoted, and meta kernels that are written in
// Python take it as a number.
bool is_number(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

template <typename Call>
void each_tensor(const c10::IValue& value, Call call) {
  if (value.isTensor()) {
    call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) call(each);
  } else if (value.isOptionalTensorList()) {
    for (const auto& each : value.toOptionalTensorVector())
      if (each.has_value()) call(*each);
  }
}

template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector()) made.push_back(change(each));
    return c10::IValue(std::move(made));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector())
      made.push_back(each.has_value() ? std::optional<at::Tensor>(change(*each)) : each);
    return c10::IValue(std::move(made));
  }
  return value;
}

// Tensors of the device as tensors of another key: views of one storage stay views of one storage.
class Loan {
 public:
  explicit Loan(c10::DispatchKey key) : key_(key) {}

  at::Tensor lend(const at::Tensor& there) {
    for (auto& [original, lent] : tensors_)
      if (original.unsafeGetTensorImpl() == there.unsafeGetTensorImpl()) return lent;
    auto made = tensor_like(storage_for(there), key_, there);
    tensors_.emplace_back(there, made);
    return made;
  }
  const at::Tensor* original_of(const at::Tensor& lent) const {
    for (auto& [original, each] : tensors_)
      if (each.unsafeGetTensorImpl() == lent.unsafeGetTensorImpl()) return &original;
    return nullptr;
  }
  const c10::Storage* storage_of(const at::Tensor& lent) const {  // that of the device, where it is one that was lent
    for (auto& [original, each] : storages_)
      if (each.unsafeGetStorageImpl() == lent.storage().unsafeGetStorageImpl()) return &original;
    return nullptr;
  }
  void add(const c10::Storage& there, const c10::Storage& lent) { storages_.emplace_back(there, lent); }

 private:
  c10::Storage storage_for(const at::Tensor& there) {
    for (auto& [original, lent] : storages_)
      if (original.unsafeGetStorageImpl() == there.storage().unsafeGetStorageImpl()) return lent;
    auto made = key_ == c10::DispatchKey::CPU
        ? storage_on_host(there.storage())
        : c10::Storage(
              c10::Storage::use_byte_size_t(), there.storage().nbytes(),
              at::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta), /*resizable=*/true);
    storages_.emplace_back(there.storage(), made);
    return made;
  }

  c10::DispatchKey key_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

void redispatch(const c10::OperatorHandle& op, c10::DispatchKey key, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

// One call of an operation.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), what_(schema_.name().c_str()),
        begin_(stack->size() - schema_.arguments().size()) {
    find_device();
    stream_ = current_stream(device_);
  }

  void run() {
    ledger().launch();
    touch_arguments();
    bool needs_host = masks_ || answers() || op_.hasTag(at::Tag::dynamic_output_shape) ||
        op_.hasTag(at::Tag::data_dependent_output);
    if (deferring() && !needs_host && run_later()) return;
    if (deferring()) synchronise_stream(stream_, nullptr);
    run_now();
    if (needs_host || host_indices_) synchronise_stream(stream_, what_);
  }

 private:
  c10::IValue& argument(size_t place) { return (*stack_)[begin_ + place]; }
  size_t arguments() const { return schema_.arguments().size(); }

  [[noreturn]] void refuse_mix(const at::Tensor& tensor) {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two: ", device_at(device_), " and ",
        tensor.device(), " (", what_, ")");
  }

  void find_device() {
    for (size_t place = 0; place < arguments(); place++)
      each_tensor(argument(place), [&](const at::Tensor& tensor) {
        if (!is_there(tensor)) return;
        if (device_ >= 0 && device_ != tensor.device().index()) refuse_mix(tensor);
        device_ = tensor.device().index();
      });
    for (size_t place = 0; place < arguments() && device_ < 0; place++)
      if (argument(place).isDevice() && argument(place).toDevice().type() == kind())
        device_ = argument(place).toDevice().has_index() ? argument(place).toDevice().index() : current_device();
    TORCH_CHECK(device_ >= 0, what_, ": on which device?");
  }

  bool answers() const {  // a number, which the host gets
    for (const auto& each : schema_.returns()) {
      auto kind = each.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType && kind != c10::TypeKind::OptionalType)
        return true;
    }
    return false;
  }

  void touch_arguments() {
    bool mixed = takes_host_tensors(schema_.name());
    for (size_t place = 0; place < arguments(); place++) {
      const auto* alias = schema_.arguments()[place].alias_info();
      bool write = alias && alias->isWrite();
      each_tensor(argument(place), [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        if (is_there(tensor)) {
          touch(tensor, write, stream_, what_);
        } else if (tensor.dim() > 0) {
          if (!mixed) refuse_mix(tensor);
          host_indices_ = true;
        }
        auto type = tensor.scalar_type();
        masks_ |= mixed && (type == at::kBool || type == at::kByte) && schema_.arguments()[place].name() == "indices";
      });
    }
  }

  // The arguments for a kernel of the CPU; one that runs later gets copies of what is the host's.
  Stack lent_arguments(Loan& loan, bool later) {
    Stack made;
    bool draws = false;
    for (size_t place = 0; place < arguments(); place++) {
      const auto& value = argument(place);
      if (schema_.arguments()[place].name() == "generator") {
        draws = true;
        auto given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
        made.emplace_back(generator_for_launch(given, device_));
      } else if (value.isDevice()) {
        made.emplace_back(c10::Device(c10::kCPU));
      } else {
        made.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
          if (is_there(tensor)) return loan.lend(tensor);
          return later && !is_number(tensor) ? tensor.clone() : tensor;
        }));
      }
    }
    TORCH_CHECK(
        draws || !op_.hasTag(at::Tag::nondeterministic_seeded), what_, " draws numbers, and takes no generator here");
    return made;
  }

  void run_now() {
    Loan loan(c10::DispatchKey::CPU);
    Stack lent = lent_arguments(loan, false);
    queue_of(stream_).push(what_, [&] { redispatch(op_, c10::DispatchKey::CPU, &lent); });
    if (deferring()) synchronise_stream(stream_, nullptr);
    stack_->resize(begin_);
    for (const auto& value : lent)
      stack_->push_back(with_tensors(value, [&](const at::Tensor& here) { return give_back(loan, here); }));
  }

  // What a kernel returned becomes a tensor of the device on the same memory.
  at::Tensor give_back(Loan& loan, const at::Tensor& here) {
    if (!here.defined()) return here;
    TORCH_CHECK(here.layout() == c10::kStrided, what_, ": only strided tensors are pretended");
    if (const auto* original = loan.original_of(here)) {
      if (original->sizes() != here.sizes()) adopt(*original, here);
      return *original;
    }
    if (const auto* storage = loan.storage_of(here)) return tensor_like(*storage, key(), here);
    auto memory = std::make_shared<Memory>();
    memory->made = here.storage();
    auto bytes = here.storage().nbytes();
    c10::Storage there(
        c10::Storage::use_byte_size_t(), bytes, own(memory, here.storage().mutable_data(), bytes, device_), &allocator(), true);
    loan.add(there, here.storage());
    auto made = tensor_like(there, key(), here);
    touch(made, true, stream_, what_);
    return made;
  }

  void adopt(const at::Tensor& there, const at::Tensor& here) {  // an empty out= that the kernel has given a size
    TORCH_CHECK(there.storage().nbytes() == 0, what_, ": an output of another size is not pretended");
    auto memory = std::make_shared<Memory>();
    memory->made = here.storage();
    auto bytes = here.storage().nbytes();
    there.storage().set_data_ptr_noswap(own(memory, here.storage().mutable_data(), bytes, device_));
    there.storage().set_nbytes(bytes);
    there.unsafeGetTensorImpl()->set_sizes_and_strides(here.sizes(), here.strides(), here.storage_offset());
    touch(there, true, stream_, what_);
  }

  // Deferred: the result's shape comes from torch's meta kernels, its memory from the allocator, its contents later.
  bool run_later() {
    Loan shapes(c10::DispatchKey::Meta);
    Stack meta;
    for (size_t place = 0; place < arguments(); place++) {
      const auto& value = argument(place);
      if (value.isDevice())
        meta.emplace_back(c10::Device(c10::kMeta));
      else if (schema_.arguments()[place].name() == "generator")
        meta.emplace_back();
      else
        meta.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
          return is_number(tensor) ? tensor : shapes.lend(tensor);
        }));
    }
    try {
      redispatch(op_, c10::DispatchKey::Meta, &meta);
    } catch (const c10::NotImplementedError&) {
      std::lock_guard<std::mutex> guard(unshaped_mutex);
      unshaped_names.insert(what_);
      return false;
    }
    Loan loan(c10::DispatchKey::CPU);
    std::vector<c10::IValue> results;
    for (const auto& value : meta)
      results.push_back(with_tensors(value, [&](const at::Tensor& shape) { return from_shape(shapes, shape); }));
    Stack lent = lent_arguments(loan, true);
    std::vector<std::vector<at::Tensor>> wanted;
    for (const auto& value : results) {
      wanted.emplace_back();
      each_tensor(value, [&](const at::Tensor& each) {
        wanted.back().push_back(each.defined() ? loan.lend(each) : each);
      });
    }
    auto op = op_;
    queue_of(stream_).push(what_, [op, lent, wanted]() mutable {
      redispatch(op, c10::DispatchKey::CPU, &lent);
      for (size_t place = 0; place < wanted.size(); place++) {
        size_t number = 0;
        each_tensor(lent[place], [&](const at::Tensor& made) {
          const auto& into = wanted[place].at(number++);
          if (!made.defined() || !into.defined() || made.unsafeGetTensorImpl() == into.unsafeGetTensorImpl()) return;
          if (made.storage().data() == into.storage().data() && made.storage().nbytes()) return;  // a view
          if (!made.numel()) return;  // In eval mode the batch norm of the CPU returns no statistics.
          into.copy_(made);
        });
      }
    });
    stack_->resize(begin_);
    for (auto& value : results) stack_->push_back(std::move(value));
    return true;
  }

  at::Tensor from_shape(Loan& shapes, const at::Tensor& shape) {
    if (!shape.defined()) return shape;
    if (const auto* original = shapes.original_of(shape)) {
      if (original->sizes() != shape.sizes()) original->resize_(shape.sizes());
      return *original;
    }
    if (const auto* storage = shapes.storage_of(shape)) return tensor_like(*storage, key(), shape);
    auto options = at::TensorOptions().dtype(shape.dtype()).device(device_at(device_));
    auto made = at::empty_strided(shape.sizes(), shape.strides(), options);
    touch(made, true, stream_, what_);
    return made;
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  const c10::FunctionSchema& schema_;
  const char* what_;
  const size_t begin_;
  int device_ = -1;
  Key stream_ = 0;
  bool masks_ = false, host_indices_ = false;
};
}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

std::vector<std::string> unshaped() {
  std::lock_guard<std::mutex> guard(unshaped_mutex);
  return {unshaped_names.begin(), unshaped_names.end()};
}
}  // namespace pretend
