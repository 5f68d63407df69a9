#include "mesh.h"
#include "../settings.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

namespace stand_in {

namespace {

const int WAIT_MS = 20;

// Where a rank listens: an abstract socket name, which has no file and disappears with the process.
std::pair<sockaddr_un, socklen_t> address(const std::string &name, int rank) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const std::string path = name + "/" + std::to_string(rank);
    const size_t length = std::min(path.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, path.data(), length);
    return {address, socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

ncclResult_t failed(ncclResult_t result, const std::string &reason) {
    remember(reason);
    return result;
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

Mesh::Mesh(std::string name, int rank, int size, const std::atomic<bool> &stopped)
    : name_(std::move(name)), rank_(rank), size_(size), stopped_(stopped), sockets_(size, -1) {}

Mesh::~Mesh() {
    for (const int socket : sockets_) {
        close(socket);
    }
    close(listener_);
}

// Calls the ranks below, and answers those above.
ncclResult_t Mesh::meet() {
    listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const auto [here, length] = address(name_, rank_);
    if (bind(listener_, reinterpret_cast<const sockaddr *>(&here), length) != 0 || listen(listener_, size_) != 0) {
        return failed(ncclSystemError, rank_name(rank_) + " cannot listen: " + std::strerror(errno));
    }
    for (int peer = 0; peer < rank_; peer++) {
        if (const ncclResult_t result = call(peer)) {
            return result;
        }
    }
    for (int count = rank_ + 1; count < size_; count++) {
        if (const ncclResult_t result = answer()) {
            return result;
        }
    }
    return ncclSuccess;
}

// Until the other rank listens.
ncclResult_t Mesh::call(int peer) {
    const auto [there, length] = address(name_, peer);
    while (!stopped_) {
        const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(made, reinterpret_cast<const sockaddr *>(&there), length) == 0) {
            sockets_[peer] = made;
            const bool sent = write(made, &rank_, sizeof rank_) == ssize_t(sizeof rank_);
            return sent ? ncclSuccess : failed(ncclRemoteError, rank_name(peer) + " has gone");
        }
        close(made);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return failed(ncclInternalError, "aborted");
}

ncclResult_t Mesh::answer() {
    while (!stopped_) {
        pollfd waiting = {listener_, POLLIN, 0};
        if (poll(&waiting, 1, WAIT_MS) <= 0) {
            continue;
        }
        const int made = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
        int peer = -1;
        const bool known = made >= 0 && recv(made, &peer, sizeof peer, MSG_WAITALL) == ssize_t(sizeof peer);
        if (!known || peer <= rank_ || peer >= size_ || sockets_[peer] != -1) {
            return failed(ncclInvalidUsage, "two ranks are " + rank_name(peer));
        }
        sockets_[peer] = made;
        return ncclSuccess;
    }
    return failed(ncclInternalError, "aborted");
}

ncclResult_t Mesh::exchange(const Exchange &exchange) {
    if (const ncclResult_t result = copy_own(exchange)) {
        return result;
    }
    std::map<int, std::deque<Message>> goes, comes;
    for (const Piece &piece : exchange.sends) {
        goes[piece.peer].push_back({piece.bytes, piece.memory, 0});
    }
    for (const Piece &piece : exchange.receives) {
        comes[piece.peer].push_back({piece.bytes, piece.memory, 0});
    }
    while (!stopped_) {
        std::vector<pollfd> waiting;
        std::vector<int> peers;
        for (int peer = 0; peer < size_; peer++) {
            const short events = short((goes[peer].empty() ? 0 : POLLOUT) | (comes[peer].empty() ? 0 : POLLIN));
            if (peer != rank_ && events != 0) {
                waiting.push_back({sockets_[peer], events, 0});
                peers.push_back(peer);
            }
        }
        if (waiting.empty()) {
            return ncclSuccess;
        }
        poll(waiting.data(), waiting.size(), WAIT_MS);
        for (size_t index = 0; index < waiting.size(); index++) {
            const int peer = peers[index];
            const short came = waiting[index].revents;
            ncclResult_t result = (came & POLLOUT) != 0 ? send(peer, goes[peer]) : ncclSuccess;
            if (result == ncclSuccess && (came & (POLLIN | POLLHUP | POLLERR)) != 0 && !comes[peer].empty()) {
                result = receive(peer, comes[peer]);
            }
            if (result != ncclSuccess) {
                return result;
            }
        }
    }
    return failed(ncclInternalError, "aborted");
}

ncclResult_t Mesh::copy_own(const Exchange &exchange) {
    std::deque<Piece> comes;
    for (const Piece &piece : exchange.receives) {
        if (piece.peer == rank_) {
            comes.push_back(piece);
        }
    }
    for (const Piece &piece : exchange.sends) {
        if (piece.peer != rank_) {
            continue;
        }
        if (comes.empty() || comes.front().bytes != piece.bytes) {
            return failed(ncclInvalidUsage, rank_name(rank_) + " sends itself what it does not receive");
        }
        std::memmove(comes.front().memory, piece.memory, piece.bytes);
        comes.pop_front();
    }
    return comes.empty() ? ncclSuccess : failed(ncclInvalidUsage, "a rank waits for itself");
}

// Sends as much as it can without waiting.
ncclResult_t Mesh::send(int peer, std::deque<Message> &messages) {
    while (!messages.empty()) {
        Message &message = messages.front();
        const size_t head = sizeof message.length;
        const bool in_head = message.moved < head;
        const char *from = in_head ? reinterpret_cast<const char *>(&message.length) + message.moved
                                   : message.memory + (message.moved - head);
        const size_t left = (in_head ? head : head + message.length) - message.moved;
        const ssize_t moved = ::send(sockets_[peer], from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved < 0) {
            const bool full = errno == EAGAIN || errno == EINTR;
            return full ? ncclSuccess : failed(ncclRemoteError, rank_name(peer) + " has gone");
        }
        message.moved += size_t(moved);
        if (message.moved == head + message.length) {
            messages.pop_front();
        }
    }
    return ncclSuccess;
}

// Receives as much as has arrived.
ncclResult_t Mesh::receive(int peer, std::deque<Message> &messages) {
    while (!messages.empty()) {
        Message &message = messages.front();
        size_t length = 0;
        if (message.moved == 0) {
            const ssize_t seen = recv(sockets_[peer], &length, sizeof length, MSG_DONTWAIT | MSG_PEEK);
            if (seen == 0) {
                return failed(ncclRemoteError, rank_name(peer) + " has gone");
            }
            if (seen < ssize_t(sizeof length)) {
                return seen > 0 || errno == EAGAIN || errno == EINTR
                           ? ncclSuccess
                           : failed(ncclRemoteError, rank_name(peer) + " has gone");
            }
            if (length != message.length) {
                return failed(ncclInvalidUsage, rank_name(peer) + " sends " + std::to_string(length) + " bytes where "
                                                    + std::to_string(message.length) + " are expected");
            }
            recv(sockets_[peer], &length, sizeof length, MSG_DONTWAIT);
            message.moved = sizeof length;
        }
        const size_t done = message.moved - sizeof length;
        if (done < message.length) {
            const ssize_t moved = recv(sockets_[peer], message.memory + done, message.length - done, MSG_DONTWAIT);
            if (moved <= 0) {
                const bool none = moved < 0 && (errno == EAGAIN || errno == EINTR);
                return none ? ncclSuccess : failed(ncclRemoteError, rank_name(peer) + " has gone");
            }
            message.moved += size_t(moved);
        }
        if (message.moved == sizeof length + message.length) {
            messages.pop_front();
        }
    }
    return ncclSuccess;
}

}  // namespace stand_in
