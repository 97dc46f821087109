// Which place in torch the pretended device takes, and how its addresses look.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace pretend {

// One library serves both names: PRETEND_NAME is read when it is loaded, before torch asks who is there.
inline bool as_cuda() {
  static const bool found = [] {
    const char* name = std::getenv("PRETEND_NAME");
    return name && std::strcmp(name, "cuda") == 0;
  }();
  return found;
}
inline c10::DeviceType kind() { return as_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1; }
inline c10::DispatchKey key() { return as_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1; }
inline c10::Device device_at(int index) { return c10::Device(kind(), static_cast<c10::DeviceIndex>(index)); }

inline int device_count() {
  static const int found = [] {
    const char* text = std::getenv("PRETEND_DEVICES");
    return text ? std::atoi(text) : 8;
  }();
  return found;
}

// An address of the device is one of the host with a bit set that no address of a process has: whoever follows it on
// the host dies at once, as with the memory of a GPU. Alignment is kept.
constexpr uint64_t FAR_BIT = 1ULL << 60;
inline void* far(const void* here) {
  return here ? reinterpret_cast<void*>(reinterpret_cast<uint64_t>(here) | FAR_BIT) : nullptr;
}
inline void* near(const void* there) {
  return reinterpret_cast<void*>(reinterpret_cast<uint64_t>(there) & ~FAR_BIT);
}

// A stream in one number: its device in the upper half, its own number below; 0 is the default stream.
using Key = int64_t;
inline Key key_of(int device, int64_t stream) { return (static_cast<int64_t>(device) << 32) | stream; }
inline Key key_of(const c10::Stream& stream) { return key_of(stream.device_index(), stream.id()); }
inline int device_of(Key stream) { return static_cast<int>(stream >> 32); }
inline std::string name_of(Key stream) {
  return "device " + std::to_string(device_of(stream)) + " stream " + std::to_string(stream & 0xffffffff);
}

// The device and the streams that are current belong to a thread, as with CUDA.
int current_device();
void set_current_device(int device);
Key current_stream(int device);
Key set_current_stream(Key stream);  // returns the one that was current
Key new_stream(int device);

// Reports to the Python side: kind is "race", "sync", "error" or "deadlock". Never call it with a lock held.
using Reporter = void (*)(const char* kind, const std::string& text);
void set_reporter(Reporter reporter);
void report(const char* kind, const std::string& text);

// Runs what may block without Python's lock, where the caller holds it.
using Blocking = void (*)(void (*call)(void*), void* argument);
void set_blocking(Blocking blocking);
template <typename Call>
void without_python(Call call) {
  extern Blocking blocking_now;
  if (!blocking_now) return call();
  blocking_now([](void* argument) { (*static_cast<Call*>(argument))(); }, &call);
}
}  // namespace pretend
