// Sockets between any two ranks of a communicator, on one machine, and the exchange of pieces over them.
#pragma once

#include "nccl_api.h"

#include <atomic>
#include <deque>
#include <string>
#include <vector>

namespace stand_in {

// A piece that goes to a rank or comes from it.
struct Piece {
    int peer;
    char *memory;
    size_t bytes;
};

struct Exchange {
    std::vector<Piece> sends, receives;
};

class Mesh {
public:
    // Ranks of the same name meet; `stopped` ends every wait.
    Mesh(std::string name, int rank, int size, const std::atomic<bool> &stopped);
    ~Mesh();
    Mesh(const Mesh &) = delete;

    // Connects all ranks.
    ncclResult_t meet();

    // Sends and receives, in the order of the lists between any two ranks.
    ncclResult_t exchange(const Exchange &exchange);

private:
    // A message: its length, then its bytes.
    struct Message {
        size_t length;
        char *memory;
        size_t moved;
    };

    ncclResult_t call(int peer);
    ncclResult_t answer();
    ncclResult_t copy_own(const Exchange &exchange);
    ncclResult_t send(int peer, std::deque<Message> &messages);
    ncclResult_t receive(int peer, std::deque<Message> &messages);

    std::string name_;
    int rank_, size_;
    const std::atomic<bool> &stopped_;
    int listener_ = -1;
    std::vector<int> sockets_;
};

// What went wrong last, for ncclGetLastError.
void remember(const std::string &reason);

}  // namespace stand_in
