// A process group for the pretended device, with NCCL's rules:
// - a send or receive outside a batch runs on the communicator of its pair of ranks, both directions on one stream; with a
//   device bound to the group (init_process_group(device_id=)) on the group's; a batch or a collective on the group's;
// - no tags, nothing is buffered, sizes must agree (wire.h);
// - a communicator is made at its first use, which blocks the hosts of all its members;
// - wait() makes the current stream wait, and not the host, unless a time-out is given.
#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <set>

#include "communicator.h"
#include "deadlock.h"
#include "memory.h"

namespace pretend {
namespace {
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::atomic<int64_t> launched{0};

// Collectives of several communicators that no order of streams keeps apart have to be launched in one order everywhere.
std::mutex order_mutex;
std::vector<std::pair<std::string, std::string>> side_by_side;  // (launched first, launched second)

struct Job {  // what is to be launched
  std::string what, text;
  Parts parts;
  std::function<void()> finish;
  Tensors tensors;
  std::vector<bool> writes;
};

struct PretendWork final : public c10d::Work {
  PretendWork(int rank, c10d::OpType kind, OperationPtr operation, int device, Tensors results)
      : Work(rank, kind), operation(std::move(operation)), device(device), results(std::move(results)) {}
  bool isCompleted() override { return !operation || operation->end->reached(); }
  bool isSuccess() const override { return !operation || !operation->error(); }
  std::exception_ptr exception() const override { return operation ? operation->error() : nullptr; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!operation) return true;
    raise();
    block(current_stream(device), operation->end);
    if (timeout != kNoTimeout) {
      bool ended = false;
      without_python([&] { ended = operation->end->wait_for(timeout); });
      TORCH_CHECK(ended, "time-out of ", timeout.count(), " ms: ", operation->text);
      ledger().host_waited(operation->end->clock, "work.wait(timeout)");
    }
    raise();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_at(device)});
    wait(kNoTimeout);  // The future's events stand for the stream that waits here.
    future->markCompleted(c10::IValue(results));
    return future;
  }
  void raise() {
    if (!operation->end->reached()) return;
    if (auto error = operation->error()) std::rethrow_exception(error);
  }

  OperationPtr operation;
  int device;
  Tensors results;
};

char* bytes_of(const at::Tensor& here) { return static_cast<char*>(here.data_ptr()); }
int64_t size_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }
std::string bytes_text(const at::Tensor& tensor) { return std::to_string(size_of(tensor)) + " bytes"; }

// The reduction of all ranks' contributions, in the order of the ranks: the same bits everywhere, each time.
at::Tensor reduced(const Tensors& all, const c10d::ReduceOp& how) {
  auto total = all.at(0).clone();
  using Kind = c10d::ReduceOp::RedOpType;
  auto scale = [&](at::Tensor value) {
    const auto& given = *static_cast<c10d::PreMulSumSupplement*>(how.supplement_.get());
    return given.tensor_factor.defined() ? value.mul(given.tensor_factor.cpu()) : value.mul(given.double_factor);
  };
  if (how.op_ == Kind::PREMUL_SUM) total = scale(total);
  for (size_t rank = 1; rank < all.size(); rank++) {
    const auto& next = all[rank];
    switch (how.op_) {
      case Kind::SUM:
      case Kind::AVG: total.add_(next); break;
      case Kind::PREMUL_SUM: total.add_(scale(next)); break;
      case Kind::PRODUCT: total.mul_(next); break;
      case Kind::MIN: total = at::minimum(total, next); break;
      case Kind::MAX: total = at::maximum(total, next); break;
      case Kind::BAND: total.bitwise_and_(next); break;
      case Kind::BOR: total.bitwise_or_(next); break;
      case Kind::BXOR: total.bitwise_xor_(next); break;
      default: TORCH_CHECK(false, "this reduction is not pretended");
    }
  }
  if (how.op_ == Kind::AVG) total.div_(static_cast<double>(all.size()));
  return total;
}

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, std::vector<int> ranks, double timeout)
      : Backend(rank, static_cast<int>(ranks.size())), store_(std::move(store)), name_(std::move(name)),
        ranks_(std::move(ranks)), timeout_(timeout) {}
  ~Group() override { shutdown(); }
  const std::string getBackendName() const override { return "pretendccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = static_cast<double>(timeout.count()) / 1000; }

  void abort() override { end("the process group " + name_ + " was aborted"); }
  void shutdown() override { end("the process group " + name_ + " was destroyed"); }

  // ---------------------------------------------------------------- point to point
  WorkPtr send(Tensors& tensors, int to, int) override { return point(tensors, to, true); }
  WorkPtr recv(Tensors& tensors, int from, int) override { return point(tensors, from, false); }

  void startCoalescing() override {
    batch_.clear();
    batching_ = true;
  }
  WorkPtr endCoalescing() override {
    batching_ = false;
    auto taken = std::move(batch_);
    batch_.clear();
    if (taken.empty()) return done(c10d::OpType::COALESCED);
    bool points = true;
    for (const auto& each : taken) points &= each.what == "p2p";
    return launch(group_communicator(), points ? merged(taken) : chained(taken), c10d::OpType::COALESCED);
  }

  // ---------------------------------------------------------------- collectives
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return all_of(tensors, [&](at::Tensor& each) { return reduction("all_reduce", each, options.reduceOp, -1); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return all_of(
        tensors, [&](at::Tensor& each) { return reduction("reduce", each, options.reduceOp, int(options.rootRank)); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return all_of(tensors, [&](at::Tensor& each) {
      auto root = int(options.rootRank);
      auto job = job_of("broadcast", {each}, {getRank() != root});
      auto here = on_host(each);
      if (getRank() == root)
        send_to_others(job, [&](int) { return here; });
      else
        job.parts.emplace_back(root, false, bytes_of(here), size_of(here));
      return keep(std::move(job), {here});
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return collective(gather_job("all_gather", outputs.at(0), inputs.at(0)), c10d::OpType::ALLGATHER);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return collective(gather_job("all_gather", pieces(output), input), c10d::OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Job> jobs;
    for (size_t place = 0; place < outputs.size(); place++)
      jobs.push_back(gather_job("all_gather", pieces(outputs[place]), inputs[place]));
    return collective(chained(jobs), c10d::OpType::COALESCED);
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return collective(scatter_job(outputs.at(0), inputs.at(0), options.reduceOp), c10d::OpType::REDUCE_SCATTER);
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return collective(scatter_job(output, pieces(input), options.reduceOp), c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Job> jobs;
    for (size_t place = 0; place < outputs.size(); place++)
      jobs.push_back(scatter_job(outputs[place], pieces(inputs[place]), options.reduceOp));
    return collective(chained(jobs), c10d::OpType::COALESCED);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return collective(exchange_job(outputs, inputs), c10d::OpType::ALLTOALL);
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions&) override {
    auto split = [&](at::Tensor& each, const std::vector<int64_t>& sizes) {
      auto parts = sizes.empty() ? each.chunk(getSize()) : each.split_with_sizes(sizes);
      return Tensors(parts.begin(), parts.end());
    };
    return collective(exchange_job(split(output, output_sizes), split(input, input_sizes)), c10d::OpType::ALLTOALL_BASE);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto job = job_of("barrier", {}, {});
    for (int peer = 0; peer < getSize(); peer++)
      if (peer != getRank()) {
        job.parts.emplace_back(peer, true, nullptr, 0);
        job.parts.emplace_back(peer, false, nullptr, 0);
      }
    auto work = collective(std::move(job), c10d::OpType::BARRIER);
    work->wait(kNoTimeout);
    synchronise_stream(current_stream(current_device()), "barrier()");  // The host waits in NCCL's, too.
    return work;
  }

 private:
  void end(const std::string& why) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [name, each] : communicators_) each->abort(why);
  }

  WorkPtr done(c10d::OpType kind) {
    return c10::make_intrusive<PretendWork>(getRank(), kind, nullptr, current_device(), Tensors{});
  }

  // ---------------------------------------------------------------- jobs
  Job job_of(const std::string& what, Tensors tensors, std::vector<bool> writes) {
    for (const auto& each : tensors) {
      TORCH_CHECK(is_there(each), "this backend has no tensors of ", each.device());
      TORCH_CHECK(each.is_contiguous(), "Tensors must be contiguous");
    }
    return {what, what + (tensors.empty() ? "" : " of " + bytes_text(tensors[0])), {}, nullptr, tensors, std::move(writes)};
  }
  Job keep(Job job, Tensors hosts) {  // tensors of the host that the parts point into
    auto inner = std::move(job.finish);
    job.finish = [inner, hosts] {
      if (inner) inner();
    };
    return job;
  }
  template <typename Choose>
  void send_to_others(Job& job, Choose choose) {
    for (int peer = 0; peer < getSize(); peer++)
      if (peer != getRank()) {
        auto here = choose(peer);
        job.parts.emplace_back(peer, true, bytes_of(here), size_of(here));
      }
  }
  Tensors pieces(const at::Tensor& whole) {
    TORCH_CHECK(whole.is_contiguous() && whole.numel() % getSize() == 0, "the tensor cannot be cut for ", getSize(), " ranks");
    auto all = whole.view({-1}).chunk(getSize());
    if (whole.numel() == 0) all.assign(getSize(), whole.view({-1}));
    return {all.begin(), all.end()};
  }

  Job reduction(const char* what, const at::Tensor& tensor, const c10d::ReduceOp& how, int root) {
    bool result = root < 0 || root == getRank();
    auto job = job_of(what, {tensor}, {result});
    auto here = on_host(tensor);
    Tensors all(static_cast<size_t>(getSize()));
    all[getRank()] = here;
    for (int peer = 0; peer < getSize(); peer++) {
      if (peer == getRank()) continue;
      if (root < 0 || peer == root) job.parts.emplace_back(peer, true, bytes_of(here), size_of(here));
      if (!result) continue;
      all[peer] = at::empty(here.sizes(), here.options());
      job.parts.emplace_back(peer, false, bytes_of(all[peer]), size_of(all[peer]));
    }
    if (result) job.finish = [all, here, how] { here.copy_(reduced(all, how)); };
    return keep(std::move(job), {here});
  }

  Job gather_job(const char* what, const Tensors& outputs, const at::Tensor& input) {
    Tensors tensors = outputs;
    tensors.push_back(input);
    std::vector<bool> writes(outputs.size(), true);
    writes.push_back(false);
    auto job = job_of(what, tensors, writes);
    auto from = on_host(input);
    send_to_others(job, [&](int) { return from; });
    Tensors kept{from};
    for (int peer = 0; peer < getSize(); peer++) {
      auto into = on_host(outputs.at(peer));
      kept.push_back(into);
      if (peer != getRank()) job.parts.emplace_back(peer, false, bytes_of(into), size_of(into));
      else if (bytes_of(into) != bytes_of(from)) job.finish = [into, from] { into.copy_(from.view(into.sizes())); };
    }
    return keep(std::move(job), kept);
  }

  Job scatter_job(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& how) {
    Tensors tensors = inputs;
    tensors.push_back(output);
    std::vector<bool> writes(inputs.size(), false);
    writes.push_back(true);
    auto job = job_of("reduce_scatter", tensors, writes);
    auto into = on_host(output);
    Tensors all(static_cast<size_t>(getSize())), kept{into};
    for (int peer = 0; peer < getSize(); peer++) {
      auto here = on_host(inputs.at(peer));
      kept.push_back(here);
      if (peer == getRank()) {
        all[peer] = here.view(into.sizes());
        continue;
      }
      all[peer] = at::empty(into.sizes(), into.options());
      job.parts.emplace_back(peer, true, bytes_of(here), size_of(here));
      job.parts.emplace_back(peer, false, bytes_of(all[peer]), size_of(all[peer]));
    }
    job.finish = [all, into, how] { into.copy_(reduced(all, how)); };
    return keep(std::move(job), kept);
  }

  Job exchange_job(const Tensors& outputs, const Tensors& inputs) {
    Tensors tensors = outputs;
    tensors.insert(tensors.end(), inputs.begin(), inputs.end());
    std::vector<bool> writes(outputs.size(), true);
    writes.resize(tensors.size(), false);
    auto job = job_of("all_to_all", tensors, writes);
    Tensors kept;
    for (int peer = 0; peer < getSize(); peer++) {
      auto from = on_host(inputs.at(peer)), into = on_host(outputs.at(peer));
      kept.push_back(from), kept.push_back(into);
      if (peer == getRank()) {
        job.finish = [into, from] { into.copy_(from); };
        continue;
      }
      job.parts.emplace_back(peer, true, bytes_of(from), size_of(from));
      job.parts.emplace_back(peer, false, bytes_of(into), size_of(into));
    }
    return keep(std::move(job), kept);
  }

  Job merged(const std::vector<Job>& jobs) {  // a batch: all its sends and receives at once
    Job all{"p2p", "batch of", {}, nullptr, {}, {}};
    std::vector<std::function<void()>> kept;
    for (const auto& each : jobs) {
      all.text += (kept.empty() ? " " : " and ") + each.text;
      for (const auto& part : each.parts) all.parts.emplace_back(part);
      all.tensors.insert(all.tensors.end(), each.tensors.begin(), each.tensors.end());
      all.writes.insert(all.writes.end(), each.writes.begin(), each.writes.end());
      kept.push_back(each.finish);
    }
    all.finish = [kept] {
      for (const auto& each : kept) each();
    };
    return all;
  }
  Job chained(const std::vector<Job>& jobs) {  // coalesced collectives: one exchange, as all have the same members
    for (const auto& each : jobs)
      TORCH_CHECK(each.what == jobs[0].what, "only collectives of one kind are coalesced here");
    auto all = merged(jobs);
    all.what = jobs[0].what;
    return all;
  }

  template <typename Make>
  WorkPtr all_of(Tensors& tensors, Make make) {
    std::vector<Job> jobs;
    for (auto& each : tensors) jobs.push_back(make(each));
    return collective(jobs.size() == 1 ? jobs[0] : chained(jobs), c10d::OpType::UNKNOWN);
  }

  WorkPtr collective(Job job, c10d::OpType kind) {
    if (batching_) {
      batch_.push_back(std::move(job));
      return done(kind);
    }
    return launch(group_communicator(), std::move(job), kind);
  }

  WorkPtr point(Tensors& tensors, int peer, bool is_send) {
    TORCH_CHECK(tensors.size() == 1, "one tensor, and not ", tensors.size());
    TORCH_CHECK(peer != getRank(), "rank ", peer, " cannot send to itself");
    auto job = job_of("p2p", {tensors[0]}, {!is_send});
    auto here = on_host(tensors[0]);
    job.parts.emplace_back(peer, is_send, bytes_of(here), size_of(here));
    job.text = (is_send ? "send of " : "receive of ") + bytes_text(here) + (is_send ? " to rank " : " from rank ") +
        std::to_string(ranks_[peer]);
    job = keep(std::move(job), {here});
    auto kind = is_send ? c10d::OpType::SEND : c10d::OpType::RECV;
    if (batching_) {
      batch_.push_back(std::move(job));
      return done(kind);
    }
    return launch(getBoundDeviceId() ? group_communicator() : pair_communicator(peer), std::move(job), kind);
  }

  // ---------------------------------------------------------------- communicators
  CommunicatorPtr group_communicator() {
    std::vector<int> members(static_cast<size_t>(getSize()));
    for (int rank = 0; rank < getSize(); rank++) members[rank] = rank;
    return communicator("all", members);
  }
  CommunicatorPtr pair_communicator(int peer) {
    auto low = std::min(peer, getRank()), high = std::max(peer, getRank());
    return communicator(std::to_string(low) + ":" + std::to_string(high), {low, high});
  }
  CommunicatorPtr communicator(const std::string& name, const std::vector<int>& members) {
    CommunicatorPtr found;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto& entry = communicators_[name];
      if (!entry) {
        entry = std::make_shared<Communicator>(name_ + "/" + name, current_device(), getRank(), ranks_);
        register_communicator(entry);
      }
      found = entry;
    }
    without_python([&] { found->connect(store_, members, timeout_); });
    return found;
  }

  WorkPtr launch(const CommunicatorPtr& communicator, Job job, c10d::OpType kind) {
    int device = job.tensors.empty() ? current_device() : job.tensors[0].device().index();
    auto stream = communicator->queue.key();
    auto operation = std::make_shared<Operation>();
    operation->id = next_operation();
    operation->text = job.text;
    operation->what = job.what;
    operation->limit = timeout_;
    for (const auto& part : job.parts) operation->parts.emplace_back(part);
    operation->finish = std::move(job.finish);
    operation->tensors = job.tensors;
    operation->after = queue_of(current_stream(device)).mark();
    ledger().wait(stream, operation->after->clock);
    for (size_t place = 0; place < job.tensors.size(); place++) {
      const auto& each = job.tensors[place];
      touch(each, job.writes[place], stream, job.writes[place] ? "a communication that writes" : "a communication that reads");
      ledger().record_stream(each.storage().data(), stream);  // NCCL's watchdog keeps them alive as well.
    }
    operation->end = std::make_shared<Moment>(&communicator->queue, operation->id);
    operation->end->clock = ledger().now(stream);
    if (job.what != "p2p") note_order(communicator, operation);
    launched++;
    communicator->launch(operation);
    return c10::make_intrusive<PretendWork>(getRank(), kind, operation, device, job.tensors);
  }

  void note_order(const CommunicatorPtr& communicator, const OperationPtr& operation) {
    auto number = collectives_[communicator->name]++;
    auto name = communicator->name + " " + std::to_string(number);
    std::lock_guard<std::mutex> guard(order_mutex);
    static auto* open = new std::map<Key, std::pair<std::string, int64_t>>;  // the last collective of each communicator
    auto stream = communicator->queue.key();
    auto now = operation->end->clock;
    for (auto& [other, last] : *open)
      if (other != stream && now[other] < last.second) side_by_side.emplace_back(last.first, name);
    (*open)[stream] = {name, now[stream]};
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const std::string name_;
  const std::vector<int> ranks_;  // in the world, by the rank in this group
  double timeout_;
  std::mutex mutex_;
  std::map<std::string, CommunicatorPtr> communicators_;
  std::map<std::string, int64_t> collectives_;
  bool batching_ = false;
  std::vector<Job> batch_;
};
}  // namespace
}  // namespace pretend

void bind_group(py::module_& m) {
  using namespace pretend;
  m.def(
      "make_group",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, const std::vector<int>& ranks,
         double timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Group>(store, name, rank, ranks, timeout);
      });
  m.def("watch_for_deadlocks", &watch_for_deadlocks);
  m.def("state", &state_of_this_process);
  m.def("messages", [] { return launched.load(); });
  m.def("side_by_side", [] {
    std::lock_guard<std::mutex> guard(order_mutex);
    return side_by_side;
  });
}
