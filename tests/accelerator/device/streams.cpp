#include "streams.h"

#include <atomic>
#include <list>
#include <stdexcept>
#include <thread>

namespace pretend {
namespace {
using SteadyClock = std::chrono::steady_clock;

std::atomic<bool> deferred{false};
std::atomic<double> lag_seconds{0.0};
Reporter reporter = nullptr;

thread_local int device_now = 0;
thread_local std::vector<int64_t> streams_now;
std::atomic<int64_t> streams_made{0};

std::mutex error_mutex;
std::string device_error;

std::mutex hang_mutex;
void (*after_host_waited)() = nullptr;
MomentPtr hang = std::make_shared<Moment>();

std::mutex waits_mutex;
std::list<MomentPtr> waits;

std::mutex queues_mutex;
std::unordered_map<Key, std::unique_ptr<Queue>>& queues() {
  static auto* all = new std::unordered_map<Key, std::unique_ptr<Queue>>;  // Their threads may outlive every static.
  return *all;
}
}  // namespace

Blocking blocking_now = nullptr;
void set_blocking(Blocking blocking) { blocking_now = blocking; }
void set_reporter(Reporter given) { reporter = given; }
void report(const char* kind, const std::string& text) {
  if (reporter) reporter(kind, text);
}

// ---------------------------------------------------------------- what is current, by thread
int current_device() { return device_now; }
void set_current_device(int device) { device_now = device; }
Key current_stream(int device) {
  return key_of(device, static_cast<size_t>(device) < streams_now.size() ? streams_now[device] : 0);
}
Key set_current_stream(Key stream) {
  auto device = static_cast<size_t>(device_of(stream));
  auto before = current_stream(static_cast<int>(device));
  if (streams_now.size() <= device) streams_now.resize(device + 1, 0);
  streams_now[device] = stream & 0xffffffff;
  return before;
}
Key new_stream(int device) { return key_of(device, ++streams_made); }

// ---------------------------------------------------------------- moments
bool Moment::reached() {
  std::lock_guard<std::mutex> guard(mutex_);
  return reached_;
}

void Moment::reach() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (reached_) return;
    reached_ = true;
    when_ = SteadyClock::now();
  }
  changed_.notify_all();
}

void Moment::wait() {
  if (reached()) return;
  if (queue_) queue_->hurry(1);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  if (queue_) queue_->hurry(-1);
}

bool Moment::wait_for(std::chrono::duration<double> limit) {
  if (queue_) queue_->hurry(1);
  bool found;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    found = changed_.wait_for(lock, limit, [&] { return reached_; });
  }
  if (queue_) queue_->hurry(-1);
  return found;
}

double Moment::seconds() {
  std::lock_guard<std::mutex> guard(mutex_);
  return std::chrono::duration<double>(when_.time_since_epoch()).count();
}

namespace {
void host_waits_at(const MomentPtr& moment) {
  if (moment->reached()) return;
  std::list<MomentPtr>::iterator place;
  {
    std::lock_guard<std::mutex> guard(waits_mutex);
    place = waits.insert(waits.end(), moment);
  }
  without_python([&] { moment->wait(); });
  std::lock_guard<std::mutex> guard(waits_mutex);
  waits.erase(place);
}
}  // namespace

// ---------------------------------------------------------------- queues
void Queue::push(const char* what, std::function<void()> run) {
  if (!always_deferred_ && !deferred) {
    std::lock_guard<std::recursive_mutex> guard(running_);
    return run();  // An error is raised where the kernel was launched.
  }
  enqueue({what, std::move(run), nullptr, nullptr, SteadyClock::now()});
}

void Queue::push_wait(const MomentPtr& moment) {
  if (!moment || moment->reached()) return;
  if (!always_deferred_ && !deferred) return host_waits_at(moment);
  enqueue({"wait", nullptr, moment, nullptr, SteadyClock::now()});
}

MomentPtr Queue::mark() {
  auto made = std::make_shared<Moment>(this, last_operation_);
  made->clock = ledger().now(key_);
  if (!always_deferred_ && !deferred)
    made->reach();
  else
    enqueue({"mark", nullptr, nullptr, made, SteadyClock::now()});
  return made;
}

void Queue::enqueue(Task task) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    tasks_.push_back(std::move(task));
    if (!started_) {
      started_ = true;
      std::thread([this] { serve(); }).detach();
    }
  }
  changed_.notify_all();
}

void Queue::hurry(int by) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    hurry_ += by;
  }
  changed_.notify_all();
}

bool Queue::idle() {
  std::lock_guard<std::mutex> guard(mutex_);
  return tasks_.empty() && !busy_;
}

MomentPtr Queue::waits_for() {
  std::lock_guard<std::mutex> guard(mutex_);
  return waits_for_;
}

void Queue::lag(const Task& task, std::unique_lock<std::mutex>& lock) {
  if (lag_seconds <= 0) return;
  auto due = task.pushed + std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(lag_seconds));
  changed_.wait_until(lock, due, [&] { return hurry_ > 0; });
}

void Queue::serve() {
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      lag(tasks_.front(), lock);
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      waits_for_ = task.wait;
    }
    carry_out(task);
    std::lock_guard<std::mutex> guard(mutex_);
    busy_ = false;
    waits_for_ = nullptr;
  }
}

void Queue::carry_out(Task& task) {
  if (task.wait) task.wait->wait();
  bool broken = [] {
    std::lock_guard<std::mutex> guard(error_mutex);
    return !device_error.empty();
  }();
  if (task.run && (always_deferred_ || !broken)) {
    try {
      task.run();
    } catch (const std::exception& error) {
      fail_device(std::string(task.what) + ": " + error.what());
    }
    task.run = nullptr;  // What it held is freed before anybody goes on.
  }
  if (task.reach) task.reach->reach();
}

namespace {
Queue& queue_of(Key stream, bool always_deferred) {
  std::lock_guard<std::mutex> guard(queues_mutex);
  auto& found = queues()[stream];
  if (!found) found = std::make_unique<Queue>(stream, always_deferred);
  return *found;
}
}  // namespace

Queue& queue_of(Key stream) { return queue_of(stream, false); }
Queue& queue_of_communicator(Key stream) { return queue_of(stream, true); }

bool deferring() { return deferred; }

void defer(bool on, double lag) {
  for (int device = 0; device < device_count(); device++) synchronise_device(device, nullptr);
  lag_seconds = lag;
  deferred = on;
}

// ---------------------------------------------------------------- waits
std::vector<MomentPtr> host_waits() {
  std::lock_guard<std::mutex> guard(waits_mutex);
  return {waits.begin(), waits.end()};
}

void set_after_host_waited(void (*call)()) { after_host_waited = call; }

void synchronise(const MomentPtr& moment, const char* why) {
  host_waits_at(moment);
  ledger().host_waited(moment->clock, why);
  if (after_host_waited) after_host_waited();
  raise_device_error();
}

void synchronise_stream(Key stream, const char* why) { synchronise(queue_of(stream).mark(), why); }

void synchronise_device(int device, const char* why) {
  std::vector<Queue*> all;
  {
    std::lock_guard<std::mutex> guard(queues_mutex);
    for (auto& [stream, queue] : queues())
      if (device_of(stream) == device) all.push_back(queue.get());
  }
  for (auto* each : all) host_waits_at(each->mark());
  ledger().host_waited(ledger().everything_on(device), why);
  if (after_host_waited) after_host_waited();
  raise_device_error();
}

void block(Key stream, const MomentPtr& moment) {
  if (!moment) return;
  ledger().wait(stream, moment->clock);
  queue_of(stream).push_wait(moment);
}

// ---------------------------------------------------------------- errors, and kernels that take time
void fail_device(const std::string& text) {
  {
    std::lock_guard<std::mutex> guard(error_mutex);
    if (device_error.empty()) device_error = text;
  }
  report("error", text);
}

void raise_device_error() {
  std::lock_guard<std::mutex> guard(error_mutex);
  if (!device_error.empty())
    throw std::runtime_error("device error, reported late: a kernel failed, perhaps long before this call: " + device_error);
}

void forget_device_error() {
  std::lock_guard<std::mutex> guard(error_mutex);
  device_error.clear();
}

void sleep_on(Key stream, double seconds) {
  queue_of(stream).push("sleep", [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}

void hang_on(Key stream) {
  if (!deferred) throw std::runtime_error("a kernel that hangs needs the deferred mode: here the host would hang with it");
  std::lock_guard<std::mutex> guard(hang_mutex);
  queue_of(stream).push_wait(hang);
}

void let_go_of_hangs() {
  std::lock_guard<std::mutex> guard(hang_mutex);
  hang->reach();
  hang = std::make_shared<Moment>();
}
}  // namespace pretend
