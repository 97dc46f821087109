// The ledger: what every stream has read and written of which memory, and what is ordered before what.
//
// An access has a number of one global count. A clock states, for each stream, up to which number its owner follows
// that stream. Streams have a clock, and so has the host: what the host has waited for comes before all that it launches.
// A race is a pair of accesses of which one writes, to bytes that both touch, where the later one's stream does not
// follow the earlier one. It is found by this rule at launch, whatever the kernels did when they ran.
#pragma once
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "platform.h"

namespace pretend {

using Clock = std::unordered_map<Key, int64_t>;
void join(Clock& into, const Clock& from);

struct Access {
  Key stream;
  int64_t number;
  bool write;
  int64_t low, high;  // bytes of the block, high excluded
  const char* what;  // the operation's name, which lives as long as the process
  std::string place;  // in the Python program, where places() was switched on
};

struct Counts {
  int64_t launches = 0, accesses = 0, synchronisations = 0, races = 0, blocks = 0;
};

class Ledger {
 public:
  void allocate(const void* at, Key home, int64_t bytes);
  void release(const void* at);
  void record_stream(const void* at, Key stream);
  void touch(const void* at, int64_t low, int64_t high, bool write, Key stream, const char* what);
  void launch();

  Clock now(Key stream);  // what an event recorded there stands for
  void wait(Key stream, const Clock& event);  // the stream waits for an event
  void host_waited(const Clock& event, const char* why);  // counted and reported, unless why is null
  Clock everything_on(int device);
  bool host_follows(Key stream, int64_t number);

  // With hosts apart, a thread knows what it has waited for itself, and what a thread knew that it heard of: Python's
  // locks and queues report who has let go of what (release) and who has got it (acquire).
  void keep_hosts_apart(bool apart);
  void host_release(int64_t token);
  void host_acquire(int64_t token);

  Counts counts();
  int64_t bytes(int device), peak(int device);
  void reset_peak(int device);
  void forget();  // all accesses: what comes later is not compared with what was before
  std::string (*place)() = nullptr;  // where the program is, asked at every access: slow

 private:
  struct Block {
    Key home;  // the stream it was allocated on: the allocator hands it out again in that stream's order
    int64_t bytes;
    int64_t born;  // the count at its allocation
    int64_t home_then;  // the last access on the home stream at its allocation
    std::vector<Access> accesses;  // that a later one could conflict with
    std::unordered_map<Key, Access> last;  // of each stream
    std::set<Key> recorded;  // by record_stream
  };
  struct Freed {  // a use of freed memory that the home stream did not follow when the memory was freed
    int64_t when, bytes;
    Access use;
  };
  Clock& host();
  void look_for_reuse(const Block&, const Clock&, const char* what, Key stream, std::vector<std::string>& found);
  void look_for_conflicts(Block&, const Clock&, const Access& now, std::vector<std::string>& found);

  std::mutex mutex_;
  Counts counts_;
  std::unordered_map<int, int64_t> bytes_, peak_;  // by device
  std::unordered_map<Key, Clock> streams_;
  bool apart_ = false;
  std::unordered_map<int64_t, Clock> hosts_;  // by thread; 0: of all together
  std::unordered_map<int64_t, Clock> handed_over_;  // by token
  std::unordered_map<const void*, Block> blocks_;
  std::unordered_map<Key, std::vector<Freed>> freed_;  // by home stream
};

Ledger& ledger();
}  // namespace pretend
