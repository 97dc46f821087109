#include "communicator.h"

namespace pretend {
namespace {
std::mutex communicators_mutex;
std::vector<std::weak_ptr<Communicator>>& communicators() {
  static auto* all = new std::vector<std::weak_ptr<Communicator>>;
  return *all;
}
std::atomic<int64_t> operations{0};
}  // namespace

int64_t next_operation() { return ++operations; }

void register_communicator(const CommunicatorPtr& communicator) {
  std::lock_guard<std::mutex> guard(communicators_mutex);
  communicators().push_back(communicator);
}

std::vector<CommunicatorPtr> all_communicators() {
  std::lock_guard<std::mutex> guard(communicators_mutex);
  std::vector<CommunicatorPtr> found;
  for (auto& each : communicators())
    if (auto one = each.lock()) found.push_back(one);
  return found;
}

std::exception_ptr Operation::error() {
  std::lock_guard<std::mutex> guard(mutex_);
  return error_;
}

void Operation::fail(std::exception_ptr error) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!error_) error_ = std::move(error);
}

// The queue is never destroyed: its thread may wait for a peer for ever.
Communicator::Communicator(std::string name, int device, int rank, std::vector<int> ranks)
    : name(std::move(name)), queue(queue_of_communicator(new_stream(device))), rank(rank), ranks(std::move(ranks)) {}

void Communicator::connect(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& members, double limit) {
  std::lock_guard<std::mutex> guard(connect_mutex_);
  if (wire_) return;
  members_ = members;
  connecting_ = true;
  try {
    wire_ = std::make_unique<Wire>(store, name, rank, members, device_of(queue.key()), aborted_, limit);
  } catch (...) {
    connecting_ = false;
    if (aborted_) throw std::runtime_error(why_aborted());
    throw;
  }
  connecting_ = false;
}

void Communicator::launch(const OperationPtr& operation) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& each : operation->parts) each.number = (each.send ? sent_ : received_)[each.peer]++;
  pending_.push_back(operation);
  operation->launched = std::chrono::steady_clock::now();
  queue.last_operation(operation->id);
  queue.push_wait(operation->after);
  // A kernel that waits for its peer may outlive the group that it was launched on.
  queue.push("communication", [self = shared_from_this(), operation] { self->run(*operation); });
}

void Communicator::run(Operation& operation) {
  operation.started = true;
  try {
    if (aborted_) throw Aborted(why_aborted());
    wire_->exchange(operation.what, operation.parts);
    if (operation.finish) operation.finish();
  } catch (const Aborted&) {
    operation.fail(std::make_exception_ptr(std::runtime_error(why_aborted())));
  } catch (const std::exception& error) {
    operation.fail(std::current_exception());
    if (deferring())
      fail_device(error.what());
    else
      report("error", error.what());
  }
  operation.finish = nullptr;
  operation.tensors.clear();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    pending_.remove_if([&](const OperationPtr& each) { return each.get() == &operation; });
  }
  operation.end->reach();
}

void Communicator::abort(const std::string& why) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!aborted_) why_ = why;
  }
  aborted_ = true;
}

std::string Communicator::why_aborted() {
  std::lock_guard<std::mutex> guard(mutex_);
  return why_;
}

std::vector<OperationPtr> Communicator::pending() {
  std::lock_guard<std::mutex> guard(mutex_);
  return {pending_.begin(), pending_.end()};
}
}  // namespace pretend
