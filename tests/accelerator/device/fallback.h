// Every operation that has no kernel of its own on the device: torch's CPU kernel on the same memory.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace pretend {
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Operations that ran with the host in deferred mode because torch cannot state their result's shape beforehand.
std::vector<std::string> unshaped();
}  // namespace pretend
