// The operations that a device must bring itself: memory, copies, views, and what the host reads.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "fallback.h"
#include "memory.h"

namespace pretend {
namespace {
// ---------------------------------------------------------------- memory
at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kind())));
  return at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(key()), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kind())));
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(key()), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  auto items = impl->numel() ? static_cast<size_t>(impl->storage_offset() + impl->numel()) : 0;
  auto need = items * self.element_size();
  auto storage = self.storage();
  if (need > storage.nbytes()) resize_bytes(storage, need);
  return self;
}

// ---------------------------------------------------------------- copies
void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
  to.copy_(from);
}

// Between devices, and between streams of two devices: on the source's stream, as torch does it, between waits of both.
void copy_on_devices(const at::Tensor& to, const at::Tensor& from) {
  auto source = current_stream(from.device().index()), target = current_stream(to.device().index());
  if (source != target) block(source, queue_of(target).mark());
  touch(from, false, source, "aten::copy_");
  touch(to, true, source, "aten::copy_");
  queue_of(source).push("copy_", [to = on_host(to), from = on_host(from)] { copy_bytes(to, from); });
  if (source != target) block(target, queue_of(source).mark());
}

void copy_from_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  auto stream = current_stream(to.device().index());
  touch(to, true, stream, "aten::copy_");
  deliver_what_is_due(&from);
  bool late = non_blocking && is_pinned(from.storage().data());
  // Memory that is not pinned is read before the call returns, whatever non_blocking states.
  auto source = deferring() && !late ? from.clone() : alias_of(from);
  queue_of(stream).push("copy_", [to = on_host(to), source] { copy_bytes(to, source); });
  if (!non_blocking && from.numel()) synchronise_stream(stream, "copy from the host, blocking");
}

void copy_to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  auto stream = current_stream(from.device().index());
  touch(from, false, stream, "aten::copy_");
  bool late = non_blocking && is_pinned(to.storage().data());
  if (late && !deferring()) return deliver_later(to, on_host(from).to(to.scalar_type()), stream);
  queue_of(stream).push("copy_", [to = alias_of(to), from = on_host(from)] { copy_bytes(to, from); });
  if (!late) synchronise_stream(stream, "copy to the host");
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& given, bool non_blocking) {
  ledger().launch();
  if (!to.numel() || !given.numel()) return to;
  auto from = given.sizes() == to.sizes() ? given : given.expand(to.sizes());
  if (is_there(to) && is_there(from))
    copy_on_devices(to, from);
  else if (is_there(to))
    copy_from_host(to, from, non_blocking);
  else
    copy_to_host(to, from, non_blocking);
  return to;
}

at::Tensor _copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return pretend::copy_(target, from, non_blocking);
}

at::Tensor _copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return pretend::_copy_from(from, to, false);
}

at::Scalar _local_scalar_dense(const at::Tensor& self) {
  auto stream = current_stream(self.device().index());
  ledger().launch();
  touch(self, false, stream, "aten::_local_scalar_dense");
  synchronise_stream(stream, "item()");
  return on_host(self).item();
}

// ---------------------------------------------------------------- views
at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_source_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, &allocator(), true);
  return at::cpu::set_(self, none, 0, {0}, {});
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  ledger().record_stream(self.storage().data(), key_of(stream));
}

// ---------------------------------------------------------------- dropout and attention
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!input.numel()) return {input, at::empty_like(input, input.options())};
  if (train.has_value() && !*train) return {input, at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, at::MemoryFormat::Contiguous).bernoulli_(p == 1 ? 0.0 : 1 - p);
  auto output = input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p));
  return {output, mask.to(at::kBool)};
}

int64_t choose_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // the one that is made of other operations
}

// ---------------------------------------------------------------- registration, once the library is loaded
torch::Library* register_kernels() {
  auto* any = new torch::Library(torch::Library::IMPL, "_", key(), __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto* m = new torch::Library(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
  m->impl("empty.memory_format", TORCH_FN(empty));
  m->impl("empty_strided", TORCH_FN(empty_strided));
  m->impl("resize_", TORCH_FN(resize_));
  m->impl("copy_", TORCH_FN(copy_));
  m->impl("_copy_from", TORCH_FN(_copy_from));
  m->impl("_copy_from_and_resize", TORCH_FN(_copy_from_and_resize));
  m->impl("_local_scalar_dense", TORCH_FN(_local_scalar_dense));
  m->impl("as_strided", TORCH_FN(as_strided));
  m->impl("view", TORCH_FN(view));
  m->impl("_reshape_alias", TORCH_FN(reshape_alias));
  m->impl("unfold", TORCH_FN(unfold));
  m->impl("set_.source_Tensor", TORCH_FN(set_source_tensor));
  m->impl("set_.source_Storage", TORCH_FN(set_source_storage));
  m->impl("set_.source_Storage_storage_offset", TORCH_FN(set_source_offset));
  m->impl("set_", TORCH_FN(set_nothing));
  m->impl("record_stream", TORCH_FN(record_stream));
  m->impl("native_dropout", TORCH_FN(native_dropout));
  if (as_cuda())
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  else
    at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
  return m;
}
const auto* registered = register_kernels();
}  // namespace
}  // namespace pretend
