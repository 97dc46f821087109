#include "wire.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace pretend {
namespace {
constexpr int SLICE = 20;  // milliseconds between looks at whether all was aborted
constexpr char SEND = 'S', RECEIVE = 'R', DATA = 'D';

struct Header {
  char kind;
  char what[23];
  int64_t size;
};

std::string packed(char kind, const std::string& what, int64_t size) {
  Header header{};
  header.kind = kind;
  std::strncpy(header.what, what.c_str(), sizeof(header.what) - 1);
  header.size = size;
  return std::string(reinterpret_cast<const char*>(&header), sizeof(header));
}

// An address in the kernel's own name space: nothing is left of it when its process ends.
sockaddr_un address_of(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  TORCH_CHECK(name.size() + 1 < sizeof(address.sun_path), "the name ", name, " is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::string text_of(const std::vector<uint8_t>& bytes) { return std::string(bytes.begin(), bytes.end()); }

int checked(int result, const char* what) {
  TORCH_CHECK(result >= 0, what, ": ", std::strerror(errno));
  return result;
}

void set_non_blocking(int file) { checked(fcntl(file, F_SETFL, fcntl(file, F_GETFL) | O_NONBLOCK), "fcntl"); }

int listen_at(const std::string& name) {
  socklen_t length;
  auto address = address_of(name, &length);
  int found = checked(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  checked(bind(found, reinterpret_cast<sockaddr*>(&address), length), "bind");
  checked(listen(found, 64), "listen");
  return found;
}

int connect_to(const std::string& name) {
  socklen_t length;
  auto address = address_of(name, &length);
  int found = checked(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket");
  checked(connect(found, reinterpret_cast<sockaddr*>(&address), length), "connect");
  return found;
}
}  // namespace

Wire::Wire(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, const std::vector<int>& members,
    int device, const std::atomic<bool>& abort, double limit)
    : name_(name), rank_(rank), abort_(abort) {
  static std::atomic<int> made{0};
  auto address = "pretend-" + std::to_string(getpid()) + "-" + std::to_string(made++);
  int listening = listen_at(address);
  store->set(name + "/" + std::to_string(rank), std::to_string(device) + " " + address);
  auto due = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit);
  auto pause = [&](int other) {
    if (abort_) give_up();
    TORCH_CHECK(
        std::chrono::steady_clock::now() < due, "rank ", rank, " waited ", limit, " s for rank ", other,
        " to make communicator ", name);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  for (int other : members) {
    if (other == rank) continue;
    auto key = name + "/" + std::to_string(other);
    while (!store->check({key})) pause(other);
    auto place = text_of(store->get(key));
    auto space = place.find(' ');
    if (std::stoi(place) == device) close(listening);
    TORCH_CHECK(
        std::stoi(place) != device, "NCCL error: invalid usage\nDuplicate GPU detected : rank ", rank, " and rank ", other,
        " both on device ", device);
    if (other > rank) continue;  // The higher rank connects.
    int socket = connect_to(place.substr(space + 1));
    checked(static_cast<int>(::send(socket, &rank, sizeof(rank), 0)), "send");
    peers_.push_back({other, socket, {}, {}, "", "", nullptr, 0, nullptr});
  }
  for (int other : members) {
    if (other <= rank) continue;
    pollfd waiting{listening, POLLIN, 0};
    while (poll(&waiting, 1, SLICE) <= 0) pause(other);
    int socket = checked(accept4(listening, nullptr, nullptr, SOCK_CLOEXEC), "accept"), who = -1;
    checked(static_cast<int>(::recv(socket, &who, sizeof(who), MSG_WAITALL)), "recv");
    peers_.push_back({who, socket, {}, {}, "", "", nullptr, 0, nullptr});
  }
  close(listening);
  for (auto& each : peers_) set_non_blocking(each.socket);
}

Wire::~Wire() {
  for (auto& each : peers_) close(each.socket);
}

void Wire::give_up() const { throw Aborted("communicator " + name_ + " was aborted"); }

Wire::Peer& Wire::peer(int rank) {
  for (auto& each : peers_)
    if (each.rank == rank) return each;
  TORCH_CHECK(false, "rank ", rank, " is no member of communicator ", name_);
}

void Wire::announce(Peer& to, bool send, int64_t size, const std::string& what) {
  to.out += packed(send ? SEND : RECEIVE, what, size);
}

void Wire::exchange(const std::string& what, Parts& parts) {
  for (auto& each : parts) announce(peer(each.peer), each.send, each.size, what);
  while (true) {
    bool done = true;
    for (auto& each : peers_) {
      match(each, what, parts);
      done &= write(each);
    }
    for (const auto& each : parts) done &= each.done;
    if (done) return;
    if (abort_) give_up();
    std::vector<pollfd> files;
    for (auto& each : peers_) files.push_back({each.socket, short(POLLIN | (each.out.empty() ? 0 : POLLOUT)), 0});
    if (poll(files.data(), files.size(), SLICE) <= 0) continue;
    bool closed = false;
    for (size_t place = 0; place < files.size(); place++) {
      if (files[place].revents & POLLIN) read(peers_[place], what, parts);
      closed |= (files[place].revents & (POLLHUP | POLLERR)) != 0;
    }
    // A kernel does not learn that its peer has died: it waits until it is aborted.
    if (closed) std::this_thread::sleep_for(std::chrono::milliseconds(SLICE));
  }
}

void Wire::match(Peer& with, const std::string& what, Parts& parts) {
  for (auto& part : parts) {
    if (part.peer != with.rank || part.done || !part.send || with.receives.empty()) continue;
    check(with, part, with.receives.front(), what);
    with.receives.pop_front();
    with.out += packed(DATA, what, part.size);
    with.out.append(part.bytes, static_cast<size_t>(part.size));
    part.done = true;  // The exchange ends once it has left.
  }
  for (auto& part : parts) {
    if (part.peer != with.rank || part.done || part.send) continue;
    // A receive is checked as soon as the send is announced; its bytes come later.
    if (!with.sends.empty() && with.payload_of != &part) {
      check(with, part, with.sends.front(), what);
    }
    break;
  }
}

void Wire::check(const Peer& with, const Part& part, const Announcement& other, const std::string& what) const {
  TORCH_CHECK(
      other.what == what, "NCCL would hang or corrupt memory: rank ", rank_, " runs ", what, " on communicator ", name_,
      " where rank ", with.rank, " runs ", other.what);
  TORCH_CHECK(
      other.size == part.size, "NCCL would hang or corrupt memory: rank ", rank_, part.send ? " sends " : " receives ",
      part.size, " bytes on communicator ", name_, " where rank ", with.rank, part.send ? " receives " : " sends ",
      other.size);
}

bool Wire::write(Peer& to) {
  while (!to.out.empty()) {
    auto sent = ::send(to.socket, to.out.data(), to.out.size(), MSG_NOSIGNAL);
    if (sent <= 0) {
      if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return false;  // as if it had not come yet
      break;
    }
    to.out.erase(0, static_cast<size_t>(sent));
  }
  return to.out.empty();
}

void Wire::read(Peer& from, const std::string& what, Parts& parts) {
  char buffer[1 << 16];
  while (true) {
    auto got = ::recv(from.socket, buffer, sizeof(buffer), 0);
    if (got <= 0) return;
    from.in.append(buffer, static_cast<size_t>(got));
    parse(from, what, parts);
  }
}

void Wire::parse(Peer& from, const std::string& what, Parts& parts) {
  size_t at = 0;
  while (true) {
    if (from.payload_of) {
      auto count = std::min<int64_t>(from.payload_left, static_cast<int64_t>(from.in.size() - at));
      std::memcpy(from.payload, from.in.data() + at, static_cast<size_t>(count));
      from.payload += count;
      from.payload_left -= count;
      at += static_cast<size_t>(count);
      if (from.payload_left) break;
      from.payload_of->done = true;
      from.payload_of = nullptr;
    }
    if (from.in.size() - at < sizeof(Header)) break;
    Header header;
    std::memcpy(&header, from.in.data() + at, sizeof(header));
    at += sizeof(header);
    if (header.kind == SEND) {
      from.sends.push_back({header.size, header.what});
    } else if (header.kind == RECEIVE) {
      from.receives.push_back({header.size, header.what});
    } else {
      for (auto& part : parts) {
        if (part.peer != from.rank || part.send || part.done) continue;
        check(from, part, from.sends.front(), what);
        from.sends.pop_front();
        from.payload_of = &part;
        from.payload = part.bytes;
        from.payload_left = part.size;
        break;
      }
      TORCH_INTERNAL_ASSERT(from.payload_of, "bytes arrived for which there is no receive");
    }
  }
  from.in.erase(0, at);
}
}  // namespace pretend
