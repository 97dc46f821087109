#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <vector>

namespace pretend {
namespace {
constexpr int64_t STATE_BYTES = 16;
constexpr uint64_t DEFAULT_SEED = 67280421310721ULL;  // as torch's

struct Generator final : public c10::GeneratorImpl {
  explicit Generator(int device) : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(key())) {}
  void set_current_seed(uint64_t given) override {
    seed_ = given;
    offset_ = 0;
  }
  void set_offset(uint64_t given) override { offset_ = given; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == STATE_BYTES && state.dtype() == at::kByte && state.device().is_cpu(),
        "the state of a generator of ", device(), " is ", STATE_BYTES, " bytes on the CPU, and this has ", state.numel());
    uint64_t words[2];
    std::memcpy(words, state.data(), STATE_BYTES);
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto found = at::empty({STATE_BYTES}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    uint64_t words[2] = {seed_, offset_};
    std::memcpy(found.data_ptr(), words, STATE_BYTES);
    return found.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }
  uint64_t take() {  // a seed for one launch
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ULL + (offset_ += 4);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31);
  }

 private:
  uint64_t seed_ = DEFAULT_SEED, offset_ = 0;
};
}  // namespace

at::Generator new_generator(int device) { return at::make_generator<Generator>(device < 0 ? current_device() : device); }

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int each = 0; each < device_count(); each++) made->push_back(new_generator(each));
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator generator_for_launch(const std::optional<at::Generator>& given, int device) {
  at::Generator found = given.has_value() && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(
      found.device().type() == kind(), "Expected a '", device_at(device), "' device type for generator but found '",
      found.device(), "'");
  std::lock_guard<std::mutex> guard(found.unsafeGetGeneratorImpl()->mutex_);
  return at::detail::createCPUGenerator(static_cast<Generator*>(found.unsafeGetGeneratorImpl())->take());
}
}  // namespace pretend
