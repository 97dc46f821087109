// Generators of the device: a seed and an offset, as a GPU's.
//
// A launch takes its numbers from (seed, offset) and moves the offset, so that they are fixed when the host launches and
// not when the kernel runs; they are others than those of the CPU's generator, and the state is 16 bytes and not 5056.
#pragma once
#include <ATen/core/Generator.h>

#include "platform.h"

namespace pretend {
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// A generator of the CPU for one launch; without one that the caller gave, by the device's own.
at::Generator generator_for_launch(const std::optional<at::Generator>& given, int device);
}  // namespace pretend
