#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <list>
#include <map>

namespace pretend {
namespace {
std::atomic<int64_t> most_bytes{0};

struct Owner {  // what a storage of the device holds
  MemoryPtr memory;
  void* there;
};

void let_go(void* context) {
  std::unique_ptr<Owner> owner(static_cast<Owner*>(context));
  ledger().release(owner->there);
}

MemoryPtr memory_of(const c10::Storage& storage) {
  const auto& pointer = storage.data_ptr();
  return pointer.get_deleter() == &let_go ? static_cast<Owner*>(pointer.get_context())->memory : nullptr;
}

struct Allocator final : public c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override { return pretend::allocate(bytes, current_device()); }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    synchronise_device(current_device(), nullptr);
    std::memcpy(near(to), near(from), count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr& data, c10::Stream stream) override {
    ledger().record_stream(data.get(), key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    for (auto* each : {&found.allocated_bytes, &found.reserved_bytes, &found.active_bytes, &found.requested_bytes}) {
      (*each)[0].current = ledger().bytes(device);
      (*each)[0].peak = ledger().peak(device);
    }
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { ledger().reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t all = most_bytes ? static_cast<size_t>(most_bytes) : size_t(8) << 30;
    return {all - static_cast<size_t>(ledger().bytes(device)), all};
  }
};
}  // namespace

c10::DeviceAllocator& allocator() {
  static auto* one = new Allocator;
  return *one;
}

at::DataPtr own(MemoryPtr memory, void* here, size_t bytes, int device) {
  void* there = bytes ? far(here) : nullptr;
  ledger().allocate(there, current_stream(device), static_cast<int64_t>(bytes));
  return at::DataPtr(there, new Owner{std::move(memory), there}, &let_go, device_at(device));
}

at::DataPtr allocate(size_t bytes, int device) {
  if (most_bytes && ledger().bytes(device) + static_cast<int64_t>(bytes) > most_bytes)
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "out of memory on ", device_at(device), ": tried to allocate ", bytes, " bytes, ",
        ledger().bytes(device), " of ", most_bytes.load(), " are in use");
  auto memory = std::make_shared<Memory>();
  memory->allocated = c10::GetCPUAllocator()->allocate(bytes);
  void* here = memory->allocated.get();
  return own(std::move(memory), here, bytes, device);
}

void limit_memory(int64_t bytes) { most_bytes = bytes; }

// ---------------------------------------------------------------- pinned memory of the host
namespace {
std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}

struct PinnedOwner {
  at::DataPtr memory;
};
void unpin(void* context) {
  std::unique_ptr<PinnedOwner> owner(static_cast<PinnedOwner*>(context));
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned().erase(static_cast<const char*>(owner->memory.get()));
}

struct PinnedAllocator final : public c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    auto owner = std::make_unique<PinnedOwner>();
    owner->memory = c10::GetCPUAllocator()->allocate(bytes);
    void* here = owner->memory.get();
    if (here) {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned()[static_cast<const char*>(here)] = bytes;
    }
    return at::DataPtr(here, owner.release(), &unpin, c10::Device(c10::kCPU));
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
}  // namespace

c10::Allocator& pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return *one;
}

bool is_pinned(const void* at) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto place = pinned().upper_bound(static_cast<const char*>(at));
  if (place == pinned().begin()) return false;
  --place;
  return static_cast<const char*>(at) < place->first + std::max<size_t>(place->second, 1);
}

// ---------------------------------------------------------------- tensors
bool is_there(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kind(); }

void touch(const at::Tensor& tensor, bool write, Key stream, const char* what) {
  if (!tensor.defined() || !tensor.numel()) return;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto item = static_cast<int64_t>(tensor.element_size());
  ledger().touch(tensor.storage().data(), tensor.storage_offset() * item, (last + 1) * item, write, stream, what);
}

at::Tensor tensor_like(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

c10::Storage storage_on_host(const c10::Storage& there) {
  auto bytes = there.nbytes();
  auto* kept = new MemoryPtr(memory_of(there));
  at::DataPtr pointer(
      near(there.data()), kept, [](void* context) { delete static_cast<MemoryPtr*>(context); }, c10::Device(c10::kCPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, bytes ? std::move(pointer) : c10::GetCPUAllocator()->allocate(0),
      c10::GetCPUAllocator(), /*resizable=*/bytes == 0));
}

at::Tensor on_host(const at::Tensor& there) {
  return tensor_like(storage_on_host(there.storage()), c10::DispatchKey::CPU, there);
}

at::Tensor alias_of(const at::Tensor& here) { return tensor_like(here.storage(), c10::DispatchKey::CPU, here); }

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto device = storage.device().index();
  auto made = allocate(bytes, device);
  if (auto common = std::min(bytes, storage.nbytes())) {
    auto stream = current_stream(device);
    ledger().touch(storage.data(), 0, static_cast<int64_t>(common), false, stream, "resize_storage");
    auto from = storage_on_host(storage);
    auto* to = near(made.get());
    queue_of(stream).push("resize_storage", [from, to, common] { std::memcpy(to, from.data(), common); });
  }
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

// ---------------------------------------------------------------- late deliveries to pinned memory
namespace {
struct Delivery {
  at::Tensor to, contents;
  Key stream;
  int64_t number;
};
std::mutex delivery_mutex;
std::list<Delivery>& deliveries() {
  static auto* all = new std::list<Delivery>;
  return *all;
}
}  // namespace

void deliver_later(const at::Tensor& to, const at::Tensor& contents, Key stream) {
  auto target = alias_of(to), kept = contents.clone();
  auto bytes = alias_of(to);
  if (at::isFloatingType(to.scalar_type()))
    bytes.fill_(std::numeric_limits<double>::quiet_NaN());
  else
    bytes.fill_(to.scalar_type() == at::kBool ? 1 : 99);
  std::lock_guard<std::mutex> guard(delivery_mutex);
  deliveries().push_back({target, kept, stream, ledger().now(stream)[stream]});
}

void deliver_what_is_due(const at::Tensor* wanted_by_device) {
  std::list<Delivery> due;
  {
    std::lock_guard<std::mutex> guard(delivery_mutex);
    auto& all = deliveries();
    for (auto place = all.begin(); place != all.end();) {
      auto next = std::next(place);
      bool wanted = wanted_by_device && wanted_by_device->storage().data() == place->to.storage().data();
      if (wanted || ledger().host_follows(place->stream, place->number)) due.splice(due.end(), all, place);
      place = next;
    }
  }
  for (auto& each : due) each.to.copy_(each.contents);
}

namespace {
const bool registered = [] {
  set_after_host_waited([] { deliver_what_is_due(); });
  return true;
}();
}  // namespace
}  // namespace pretend
