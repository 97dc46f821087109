// How the members of a communicator exchange bytes: a socket for each pair, and nothing buffered.
//
// A send announces its size, and so does the receive; the bytes travel once both have. The k-th send to a peer meets the
// k-th receive there, and if their sizes or what they are part of differ, both sides raise it.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace pretend {

struct Part {  // one send or receive of an operation
  int peer;
  bool send;
  char* bytes;
  int64_t size;
  int64_t number = 0;  // the k-th in that direction between the two, by the communicator
  std::atomic<bool> done{false};

  Part(int peer, bool send, char* bytes, int64_t size) : peer(peer), send(send), bytes(bytes), size(size) {}
  Part(const Part& other)
      : peer(other.peer), send(other.send), bytes(other.bytes), size(other.size), number(other.number), done(other.done.load()) {}
};
using Parts = std::deque<Part>;

struct Aborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Wire {
 public:
  // Blocks until every member has come, as a lazy NCCL communicator does; each must have a device of its own.
  Wire(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, const std::vector<int>& members,
       int device, const std::atomic<bool>& abort, double limit);
  ~Wire();

  // Runs all parts at once, and ends when all have ended. `what` must be the same at both ends.
  void exchange(const std::string& what, Parts& parts);

 private:
  struct Announcement {
    int64_t size;
    std::string what;
  };
  struct Peer {
    int rank, socket;
    std::deque<Announcement> sends, receives;  // that it has announced, and that have met none of ours
    std::string out;
    std::string in;
    char* payload = nullptr;  // where bytes that arrive now belong
    int64_t payload_left = 0;
    Part* payload_of = nullptr;
  };
  Peer& peer(int rank);
  void announce(Peer& to, bool send, int64_t size, const std::string& what);
  void match(Peer& with, const std::string& what, Parts& parts);
  void check(const Peer& with, const Part& part, const Announcement& other, const std::string& what) const;
  bool write(Peer& to);
  void read(Peer& from, const std::string& what, Parts& parts);
  void parse(Peer& from, const std::string& what, Parts& parts);
  [[noreturn]] void give_up() const;

  const std::string name_;
  const int rank_;
  const std::atomic<bool>& abort_;
  std::vector<Peer> peers_;
};
}  // namespace pretend
