#include "deadlock.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include "communicator.h"

namespace pretend {
namespace {
constexpr int64_t CONNECTION = -1;  // the number of a part that stands for making the communicator

struct PartState {
  bool send;
  int peer;  // in the world
  int64_t number;
};
struct OperationState {
  int64_t id, after;  // `after`: the operation that the caller's stream stands at; 0: none
  bool started;
  int place;  // in the communicator's queue
  std::string communicator, text;
  std::vector<PartState> parts;  // that have not ended
};
struct ProcessState {
  int rank;
  std::vector<OperationState> operations;
  std::vector<int64_t> hosts;  // operations that threads of the host wait for
};
using World = std::map<int, ProcessState>;

// The operation that a moment waits for, through streams that stand at others.
int64_t stands_at(MomentPtr moment) {
  for (int steps = 0; moment && steps < 32; steps++) {
    if (moment->reached()) return 0;
    if (moment->operation()) return moment->operation();
    moment = moment->queue() ? moment->queue()->waits_for() : nullptr;
  }
  return 0;
}

ProcessState state_now(int rank) {
  ProcessState found{rank, {}, {}};
  for (auto& each : all_communicators()) {
    if (each->connecting()) {
      OperationState making{-1 - int64_t(found.operations.size()), 0, true, 0, each->name, "making of the communicator", {}};
      for (int member : each->members())
        if (member != each->rank) making.parts.push_back({true, each->ranks[member], CONNECTION});
      found.hosts.push_back(making.id);
      found.operations.push_back(std::move(making));
    }
    int place = 0;
    for (auto& operation : each->pending()) {
      OperationState state{operation->id,     stands_at(operation->after), operation->started, place++, each->name,
                           operation->text, {}};
      for (const auto& part : operation->parts)
        if (!part.done) state.parts.push_back({part.send, each->ranks[part.peer], part.number});
      found.operations.push_back(std::move(state));
    }
  }
  for (auto& moment : host_waits())
    if (auto id = stands_at(moment)) found.hosts.push_back(id);
  return found;
}

std::string packed(const ProcessState& state) {
  std::ostringstream text;
  text << "R " << state.rank << "\n";
  for (const auto& each : state.operations) {
    text << "O " << each.id << " " << each.after << " " << each.started << " " << each.place << " " << each.communicator
         << " " << each.text << "\n";
    for (const auto& part : each.parts) text << "P " << part.send << " " << part.peer << " " << part.number << "\n";
  }
  for (auto id : state.hosts) text << "H " << id << "\n";
  text << "E\n";
  return text.str();
}

std::optional<ProcessState> unpacked(std::istream& text) {
  ProcessState found{-1, {}, {}};
  std::string kind;
  while (text >> kind) {
    if (kind == "E") return found;
    if (kind == "R") {
      text >> found.rank;
    } else if (kind == "O") {
      OperationState each{};
      text >> each.id >> each.after >> each.started >> each.place >> each.communicator;
      std::getline(text >> std::ws, each.text);
      found.operations.push_back(std::move(each));
    } else if (kind == "P") {
      PartState part{};
      text >> part.send >> part.peer >> part.number;
      found.operations.back().parts.push_back(part);
    } else {
      found.hosts.emplace_back();
      text >> found.hosts.back();
    }
  }
  return std::nullopt;
}

// ---------------------------------------------------------------- the graph of waits
struct Node {
  int rank;
  const OperationState* operation;
  std::string why;  // how the one before it in the cycle waits for it
};

const OperationState* find(const ProcessState& process, int64_t id) {
  for (const auto& each : process.operations)
    if (each.id == id) return &each;
  return nullptr;
}

const OperationState* partner(const ProcessState& of, const OperationState& operation, const PartState& part, int rank) {
  for (const auto& each : of.operations)
    if (each.communicator == operation.communicator)
      for (const auto& other : each.parts)
        if (other.peer == rank && other.number == part.number &&
            (part.number == CONNECTION || other.send != part.send))
          return &each;
  return nullptr;
}

std::vector<Node> waits_of(const World& world, const Node& node) {
  std::vector<Node> found;
  const auto& own = world.at(node.rank);
  const auto& operation = *node.operation;
  if (operation.place > 0) {
    for (const auto& each : own.operations)
      if (each.communicator == operation.communicator && each.place == operation.place - 1)
        found.push_back({node.rank, &each, "stands behind"});
    return found;
  }
  if (!operation.started) {
    if (operation.after)
      if (const auto* other = find(own, operation.after))
        found.push_back({node.rank, other, "is launched on a stream that waits for"});
    return found;
  }
  for (const auto& part : operation.parts) {
    auto process = world.find(part.peer);
    if (process == world.end()) continue;
    if (const auto* other = partner(process->second, operation, part, node.rank)) {
      found.push_back({part.peer, other, "needs"});
    } else {
      for (auto id : process->second.hosts)
        if (const auto* stopped = find(process->second, id))
          found.push_back({part.peer, stopped, "needs rank " + std::to_string(part.peer) + "'s host, which waits for"});
    }
  }
  return found;
}

std::optional<std::vector<Node>> cycle_from(const World& world, std::vector<Node>& path) {
  for (auto& next : waits_of(world, path.back())) {
    for (size_t place = 0; place < path.size(); place++)
      if (path[place].operation == next.operation) {
        std::vector<Node> cycle(path.begin() + long(place), path.end());
        cycle.push_back(next);
        return cycle;
      }
    if (path.size() > 200) return std::nullopt;
    path.push_back(next);
    if (auto found = cycle_from(world, path)) return found;
    path.pop_back();
  }
  return std::nullopt;
}

std::string described(const World& world, const std::vector<Node>& cycle) {
  std::ostringstream text;
  text << "NCCL would hang: these wait for one another\n";
  for (size_t place = 0; place < cycle.size(); place++) {
    const auto& each = cycle[place];
    text << "    " << (place ? each.why + " " : std::string()) << "rank " << each.rank << "'s " << each.operation->text
         << " (communicator " << each.operation->communicator << ")\n";
  }
  text << "queues:";
  for (const auto& [rank, process] : world) {
    std::map<std::string, std::string> queues;
    for (const auto& each : process.operations) {
      auto& queue = queues[each.communicator];
      queue += (queue.empty() ? "" : ", then ") + each.text;
    }
    for (const auto& [name, queue] : queues) text << "\n    rank " << rank << ", communicator " << name << ": " << queue;
    if (queues.empty()) text << "\n    rank " << rank << ": nothing";
  }
  return text.str();
}

// ---------------------------------------------------------------- the thread that looks
std::string file_of(const std::string& folder, int rank) { return folder + "/rank-" + std::to_string(rank); }

void publish(const std::string& folder, int rank, const std::string& content) {
  auto half = file_of(folder, rank) + ".half";
  std::ofstream(half) << content;
  std::rename(half.c_str(), file_of(folder, rank).c_str());
}

World everybody(const std::string& folder) {
  World found;
  DIR* open = opendir(folder.c_str());
  if (!open) return found;
  while (auto* entry = readdir(open)) {
    std::string name = entry->d_name;
    if (name.rfind("rank-", 0) != 0 || name.size() > 10) continue;
    std::ifstream file(folder + "/" + name);
    if (auto state = unpacked(file)) found[state->rank] = *state;
  }
  closedir(open);
  return found;
}

void abort_all(const std::string& why) {
  for (auto& each : all_communicators()) each->abort(why);
}

void enforce_timeouts() {
  auto now = std::chrono::steady_clock::now();
  for (auto& each : all_communicators())
    for (auto& operation : each->pending())
      if (std::chrono::duration<double>(now - operation->launched).count() > operation->limit) {
        auto text = "watchdog: " + operation->text + " on communicator " + each->name + " has not ended within " +
            std::to_string(operation->limit) + " s";
        report("error", text);
        const char* mode = std::getenv("PRETEND_WATCHDOG");
        if (!mode || std::string(mode) == "kill") {  // as NCCL's does
          fprintf(stderr, "%s; the process ends\n", text.c_str());
          std::abort();
        }
        abort_all(text);
        return;
      }
}

void look(int rank, std::string folder, double patience) {
  std::string last;
  auto since = std::chrono::steady_clock::now();
  bool published = false;
  while (true) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    enforce_timeouts();
    auto state = state_now(rank);
    auto content = packed(state);
    auto now = std::chrono::steady_clock::now();
    if (content != last) {
      last = content, since = now;
      if (published) publish(folder, rank, "");  // It moves: nobody may conclude from where it stood.
      published = false;
    }
    if (state.operations.empty() && state.hosts.empty()) continue;
    if (std::chrono::duration<double>(now - since).count() < patience) continue;
    if (!published) publish(folder, rank, content);
    published = true;
    auto world = everybody(folder);
    if (!world.count(rank)) continue;
    for (const auto& each : world.at(rank).operations) {
      std::vector<Node> path{{rank, &each, ""}};
      auto cycle = cycle_from(world, path);
      if (!cycle) continue;
      auto text = described(world, *cycle);
      report("deadlock", text);
      fprintf(stderr, "%s\n", text.c_str());  // Whoever catches the error may wait for ever.
      std::this_thread::sleep_for(std::chrono::milliseconds(500));  // The others read where this one stood.
      if (deferring()) fail_device(text);  // Hosts that run ahead learn of it when they wait for the device.
      abort_all(text);
      return;
    }
  }
}
}  // namespace

void watch_for_deadlocks(int rank, const std::string& folder, double patience) {
  static std::once_flag once;
  std::call_once(once, [&] { std::thread(look, rank, folder, patience).detach(); });
}

std::string state_of_this_process(int rank) {
  World world{{rank, state_now(rank)}};
  return described(world, {});
}
}  // namespace pretend
