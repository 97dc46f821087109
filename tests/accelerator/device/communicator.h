// A communicator: one stream, on which all that is launched runs one after the other, in the order of the launches.
#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>

#include "streams.h"
#include "wire.h"

namespace pretend {

struct Operation {
  int64_t id;
  std::string text;  // for people: "send of 64 bytes to rank 1"
  std::string what;  // must be the same at both ends: "p2p", "all_reduce"
  Parts parts;
  std::function<void()> finish;  // once all parts have ended
  std::vector<at::Tensor> tensors;
  MomentPtr after, end;  // what the stream of the caller has to reach first; its own end
  std::atomic<bool> started{false};
  std::chrono::steady_clock::time_point launched;
  double limit = 0;  // seconds that its group allows it

  std::exception_ptr error();
  void fail(std::exception_ptr error);

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};
using OperationPtr = std::shared_ptr<Operation>;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::string name, int device, int rank, std::vector<int> ranks);

  // Blocks the host until all members have come.
  void connect(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& members, double limit);
  void launch(const OperationPtr& operation);  // its tensors are checked and recorded by the caller
  void abort(const std::string& why);

  const std::string name;  // the same at all members, and of no other communicator
  Queue& queue;
  const int rank;  // in the group
  const std::vector<int> ranks;  // in the world, by the rank in the group

  std::vector<OperationPtr> pending();
  bool connecting() const { return connecting_; }
  const std::vector<int>& members() const { return members_; }
  std::string why_aborted();

 private:
  void run(Operation& operation);

  std::mutex mutex_, connect_mutex_;
  std::list<OperationPtr> pending_;
  std::map<int, int64_t> sent_, received_;  // by peer
  std::vector<int> members_;
  std::unique_ptr<Wire> wire_;
  std::atomic<bool> aborted_{false}, connecting_{false};
  std::string why_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

int64_t next_operation();
void register_communicator(const CommunicatorPtr& communicator);
std::vector<CommunicatorPtr> all_communicators();
}  // namespace pretend
