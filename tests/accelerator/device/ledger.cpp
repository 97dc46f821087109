#include "ledger.h"

#include <atomic>
#include <sstream>

namespace pretend {
namespace {
std::atomic<int64_t> threads{0};
thread_local const int64_t this_thread = ++threads;

std::string describe(const Access& each) {
  std::ostringstream text;
  text << (each.write ? "write" : "read") << " by " << each.what << " on " << name_of(each.stream) << " (bytes "
       << each.low << " to " << each.high << ", access " << each.number << ")";
  if (!each.place.empty()) text << " at " << each.place;
  return text.str();
}
int64_t known(const Clock& clock, Key stream) {
  auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}
bool follows(const Clock& clock, Key stream, const Access& earlier) {
  return earlier.stream == stream || known(clock, earlier.stream) >= earlier.number;
}
}  // namespace

void join(Clock& into, const Clock& from) {
  for (const auto& [stream, number] : from) {
    auto& mine = into[stream];
    if (mine < number) mine = number;
  }
}

Ledger& ledger() {
  static auto* one = new Ledger;  // Never destroyed: tensors may outlive every static.
  return *one;
}

// Threads that never reported a lock, such as autograd's, are taken to know what any thread knows.
Clock& Ledger::host() {
  auto own = apart_ ? hosts_.find(this_thread) : hosts_.end();
  if (own != hosts_.end()) return own->second;
  Clock& common = hosts_[0];
  if (apart_)
    for (const auto& [thread, clock] : hosts_)
      if (thread) join(common, clock);
  return common;
}

void Ledger::allocate(const void* at, Key home, int64_t size) {
  if (!at) return;
  std::lock_guard<std::mutex> guard(mutex_);
  auto& clock = streams_[home];
  blocks_[at] = Block{home, size, counts_.accesses, known(clock, home), {}, {}, {}};
  counts_.blocks++;
  auto& used = bytes_[device_of(home)] += size;
  if (peak_[device_of(home)] < used) peak_[device_of(home)] = used;
}

void Ledger::release(const void* at) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto place = blocks_.find(at);
  if (place == blocks_.end()) return;
  const Block& block = place->second;
  counts_.blocks--;
  bytes_[device_of(block.home)] -= block.bytes;
  for (const auto& [stream, use] : block.last)
    if (stream != block.home && !block.recorded.count(stream))
      freed_[block.home].push_back({counts_.accesses, block.bytes, use});
  blocks_.erase(place);
}

void Ledger::record_stream(const void* at, Key stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto place = blocks_.find(at);
  if (place != blocks_.end()) place->second.recorded.insert(stream);
}

void Ledger::touch(const void* at, int64_t low, int64_t high, bool write, Key stream, const char* what) {
  if (!at || low >= high) return;
  std::string where = place ? place() : std::string();
  std::vector<std::string> found;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto entry = blocks_.find(at);
    if (entry == blocks_.end()) return;
    Block& block = entry->second;
    Clock& clock = streams_[stream];
    join(clock, host());
    Access now{stream, ++counts_.accesses, write, low, high, what, std::move(where)};
    clock[stream] = now.number;
    look_for_reuse(block, clock, what, stream, found);
    look_for_conflicts(block, clock, now, found);
    block.accesses.push_back(now);
    block.last[stream] = std::move(now);
    counts_.races += static_cast<int64_t>(found.size());
  }
  for (const auto& each : found) report("race", each);
}

// Memory that the allocator hands out may have been used before: on its home stream, whose order a kernel elsewhere must
// follow, and by other streams, whose uses a kernel on the home stream must follow.
void Ledger::look_for_reuse(
    const Block& block, const Clock& clock, const char* what, Key stream, std::vector<std::string>& found) {
  const bool away = stream != block.home, first = !block.last.count(stream);
  if (away && first && known(clock, block.home) < block.home_then)
    found.push_back(
        std::string("fresh memory of ") + name_of(block.home) + " is used by " + what + " on " + name_of(stream) +
        ", which does not wait for what the first one did before the allocation");
  auto place = freed_.find(block.home);
  if (place == freed_.end()) return;
  std::vector<Freed> later;
  for (auto& each : place->second) {
    bool ordered = known(clock, each.use.stream) >= each.use.number;
    if (ordered && !away) continue;  // All that the home stream hands out from now on is ordered.
    // An older block cannot lie in that memory; a stream that was here before has been looked at.
    if (ordered || each.when > block.born || (away && !first)) {
      later.push_back(std::move(each));
      continue;
    }
    found.push_back(
        "memory (" + std::to_string(each.bytes) + " bytes) of " + name_of(block.home) + " was freed and may be used again by " +
        what + ", while another stream may still use it (no record_stream, no wait): " + describe(each.use));
  }
  place->second = std::move(later);
}

void Ledger::look_for_conflicts(Block& block, const Clock& clock, const Access& now, std::vector<std::string>& found) {
  std::vector<Access> kept;
  kept.reserve(block.accesses.size() + 1);
  for (auto& each : block.accesses) {
    bool ordered = follows(clock, now.stream, each);
    bool shared = each.low < now.high && now.low < each.high;
    if (!ordered && shared && (now.write || each.write))
      found.push_back(describe(now) + "\n    does not follow\n    " + describe(each));
    // Whoever conflicts with an access that this one covers and follows conflicts with this one, too.
    bool covered = ordered && now.low <= each.low && each.high <= now.high;
    if (!(covered && (now.write || (!each.write && each.stream == now.stream)))) kept.push_back(std::move(each));
  }
  block.accesses = std::move(kept);
}

void Ledger::launch() {
  std::lock_guard<std::mutex> guard(mutex_);
  counts_.launches++;
}

Clock Ledger::now(Key stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  join(streams_[stream], host());
  return streams_[stream];
}

void Ledger::wait(Key stream, const Clock& event) {
  std::lock_guard<std::mutex> guard(mutex_);
  join(streams_[stream], event);
}

void Ledger::host_waited(const Clock& event, const char* why) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    join(host(), event);
    if (why) counts_.synchronisations++;
  }
  if (why) report("sync", why);
}

Clock Ledger::everything_on(int device) {
  std::lock_guard<std::mutex> guard(mutex_);
  Clock all;
  for (const auto& [stream, clock] : streams_)
    if (device_of(stream) == device) join(all, clock);
  return all;
}

bool Ledger::host_follows(Key stream, int64_t number) {
  std::lock_guard<std::mutex> guard(mutex_);
  return known(host(), stream) >= number;
}

void Ledger::keep_hosts_apart(bool apart) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (apart == apart_) return;
  Clock all;
  for (const auto& [thread, clock] : hosts_) join(all, clock);
  hosts_.clear();
  handed_over_.clear();
  hosts_[apart ? this_thread : 0] = std::move(all);
  apart_ = apart;
}

void Ledger::host_release(int64_t token) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!apart_) return;
  hosts_.try_emplace(this_thread);
  join(handed_over_[token], host());
}

void Ledger::host_acquire(int64_t token) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!apart_) return;
  hosts_.try_emplace(this_thread);
  auto found = handed_over_.find(token);
  if (found != handed_over_.end()) join(host(), found->second);
}

Counts Ledger::counts() {
  std::lock_guard<std::mutex> guard(mutex_);
  return counts_;
}
int64_t Ledger::bytes(int device) {
  std::lock_guard<std::mutex> guard(mutex_);
  return bytes_[device];
}
int64_t Ledger::peak(int device) {
  std::lock_guard<std::mutex> guard(mutex_);
  return peak_[device];
}
void Ledger::reset_peak(int device) {
  std::lock_guard<std::mutex> guard(mutex_);
  peak_[device] = bytes_[device];
}

void Ledger::forget() {
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& [at, block] : blocks_) block.accesses.clear(), block.last.clear();
  freed_.clear();
}
}  // namespace pretend
