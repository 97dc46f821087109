// The device's memory, and tensors of it as CPU kernels see them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <memory>

#include "streams.h"

namespace pretend {

// Memory of the host that stands for memory of the device. Kernels that are still queued share it, so that a program
// that frees too early breaks the ledger's rule and not this process.
struct Memory {
  at::DataPtr allocated;  // of the CPU's allocator,
  c10::Storage made;  // or made by a CPU kernel
};
using MemoryPtr = std::shared_ptr<Memory>;

c10::DeviceAllocator& allocator();
at::DataPtr own(MemoryPtr memory, void* here, size_t bytes, int device);
at::DataPtr allocate(size_t bytes, int device);
void resize_bytes(const c10::Storage& storage, size_t bytes);  // with its contents

// A limit makes the allocator raise torch.OutOfMemoryError; 0 is none. It is for all devices.
void limit_memory(int64_t bytes);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* at);

bool is_there(const at::Tensor& tensor);  // on the device
void touch(const at::Tensor& tensor, bool write, Key stream, const char* what);
at::Tensor on_host(const at::Tensor& there);  // the same memory as a tensor of the CPU, kept alive by it
c10::Storage storage_on_host(const c10::Storage& there);
at::Tensor tensor_like(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);  // its type, sizes, strides
at::Tensor alias_of(const at::Tensor& here);  // another tensor of the same memory, without a Python object

// A copy to pinned memory that does not block. Immediate kernels would make a host that reads too early right by luck:
// so the memory holds rubbish until the host has waited for the copy.
void deliver_later(const at::Tensor& to, const at::Tensor& contents, Key stream);
void deliver_what_is_due(const at::Tensor* wanted_by_device = nullptr);
}  // namespace pretend
