// Streams as queues, and the moments between them.
//
// Immediate: a task runs in the thread that launches it, at once. Deferred: a stream has a thread that runs its tasks one
// after the other, so that the host runs ahead. A communicator's stream always has one, since its tasks wait for others.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "ledger.h"

namespace pretend {

class Queue;

// A place in a stream that is reached once all before it has run.
class Moment {
 public:
  explicit Moment(Queue* queue = nullptr, int64_t operation = 0) : queue_(queue), operation_(operation) {}
  Clock clock;  // what it stands for in the ledger

  bool reached();
  void reach();
  void wait();  // blocks the thread until it is reached
  bool wait_for(std::chrono::duration<double> limit);
  double seconds();  // when it was reached, by the host's clock
  Queue* queue() const { return queue_; }
  int64_t operation() const { return operation_; }  // the communication that it ends; 0: none

 private:
  Queue* queue_;
  int64_t operation_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point when_;
};
using MomentPtr = std::shared_ptr<Moment>;

class Queue {
 public:
  Queue(Key key, bool always_deferred) : key_(key), always_deferred_(always_deferred) {}
  Key key() const { return key_; }

  void push(const char* what, std::function<void()> run);  // a kernel: an error in it belongs to the device
  void push_wait(const MomentPtr& moment);  // what is pushed later runs after it
  MomentPtr mark();  // reached once all that was pushed so far has run
  void hurry(int by);  // while somebody waits, tasks do not lag
  bool idle();
  MomentPtr waits_for();  // what its thread stands at
  void last_operation(int64_t operation) { last_operation_ = operation; }  // of a communicator: what a mark stands at

 private:
  struct Task {
    const char* what;
    std::function<void()> run;
    MomentPtr wait, reach;
    std::chrono::steady_clock::time_point pushed;
  };
  void enqueue(Task task);
  void carry_out(Task& task);
  void serve();
  void lag(const Task& task, std::unique_lock<std::mutex>& lock);

  const Key key_;
  const bool always_deferred_;
  std::mutex mutex_;
  std::recursive_mutex running_;  // one immediate task of a stream at a time
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false, started_ = false;
  int hurry_ = 0;
  std::atomic<int64_t> last_operation_{0};
  MomentPtr waits_for_;
};

Queue& queue_of(Key stream);
Queue& queue_of_communicator(Key stream);  // always deferred; who waits for the device waits for it, too

// Deferred mode. With a lag, a task waits so many seconds before it runs, unless somebody waits for its stream.
bool deferring();
void defer(bool on, double lag);

// The host waits; the ledger learns of it, and counts it unless why is null. A device's late error is raised here.
void synchronise(const MomentPtr& moment, const char* why);
void synchronise_stream(Key stream, const char* why);
void synchronise_device(int device, const char* why);
void set_after_host_waited(void (*call)());
void block(Key stream, const MomentPtr& moment);  // the stream waits, the host does not

// A kernel's error is the device's: every later wait raises it, as with CUDA's device-side asserts.
void fail_device(const std::string& text);
void raise_device_error();
void forget_device_error();

// Kernels that take time, or never end until they are let go.
void sleep_on(Key stream, double seconds);
void hang_on(Key stream);
void let_go_of_hangs();

// Who waits where, for the report of a deadlock: moments that threads of the host stand at.
std::vector<MomentPtr> host_waits();
}  // namespace pretend
