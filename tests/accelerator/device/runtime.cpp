// What torch asks of any device: guards, streams, events, hooks, autocast.
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"

namespace pretend {
namespace {
struct Event {
  MomentPtr moment;
};
MomentPtr moment_of(void* event) { return event ? static_cast<Event*>(event)->moment : nullptr; }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
c10::Stream stream_of(Key stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device_of(stream)), stream & 0xffffffff);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kind(); }
  c10::Device getDevice() const override { return device_at(current_device()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "there is no device ", device, ", only ", device_count());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(key_of(index_of(device), 0)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(new_stream(index_of(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(set_current_stream(key_of(stream))); }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(key_of(stream) + 1);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->moment = queue_of(key_of(stream)).mark();
  }
  void block(void* event, const c10::Stream& stream) const override { pretend::block(key_of(stream), moment_of(event)); }
  bool queryEvent(void* event) const override {
    auto moment = moment_of(event);
    if (!moment) return true;
    if (moment->reached()) synchronise(moment, nullptr);  // The host knows it now, without having waited.
    return moment->reached();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto from = moment_of(first), to = moment_of(second);
    TORCH_CHECK(from && to && from->reached() && to->reached(), "both events must be recorded and reached");
    return (to->seconds() - from->seconds()) * 1000;
  }

  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(key_of(stream));
    if (!queue.idle()) return false;
    synchronise_stream(key_of(stream), nullptr);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronise_stream(key_of(stream), "stream.synchronize()");
  }
  void synchronizeEvent(void* event) const override {
    if (auto moment = moment_of(event)) synchronise(moment, "event.synchronize()");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronise_device(device, "synchronize()");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    ledger().record_stream(data.get(), key_of(stream));
  }
};

// The questions that both kinds of hooks answer alike.
template <typename Base>
struct Hooks : public Base {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Device getDeviceFromPtr(void*) const override { return device_at(current_device()); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
};

struct OwnHooks final : public Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

struct CudaHooks final : public Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronise_device(device, "synchronize()"); }
};

const bool registered = [] {
  c10::impl::DeviceGuardImplRegistrar(kind(), new Guard);
  c10::SetAllocator(kind(), &allocator(), 1);
  if (as_cuda())
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<CudaHooks>(); });
  else
    at::RegisterPrivateUse1HooksInterface(new OwnHooks);
  return true;
}();
}  // namespace
}  // namespace pretend

// ---------------------------------------------------------------- autocast under a name of its own: the lists of CUDA
namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
#define DIFFERENT(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_OPT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(DIFFERENT)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace at::autocast
