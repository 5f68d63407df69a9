// NCCL between processes of one machine, whose device memory is host memory. A thread of the communicator does the
// work, so that calls return before it is done, as with a non-blocking communicator.
#include "../settings.h"
#include "mesh.h"

#include <climits>
#include <condition_variable>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unistd.h>

using namespace stand_in;

struct ncclComm {
    std::string name;
    int rank, size;
    // Blocks of the device that it may take, each a channel to every peer; and the peers that it has channels to.
    int channels;
    std::set<int> connected;
    std::atomic<bool> stopped{false};
    std::atomic<ncclResult_t> state{ncclInProgress};
    std::mutex lock;
    std::condition_variable changed;
    std::function<ncclResult_t(Mesh &)> task;
    bool over = false;
    std::thread worker;
};

namespace {

const unsigned MAGIC = 0xcafebeef;

// NCCL's own limit of channels; and in place of a peer, the ring of all ranks, which has channels of its own.
const int CHANNELS_MAX = 32, RING = -1;

// The part of a configuration that the first version with all functions had.
const size_t CONFIG_BYTES = offsetof(ncclConfig_t, splitShare) + sizeof(int);

// As `Config` in crates/collectives has them.
static_assert(offsetof(ncclConfig_t, version) == 12 && offsetof(ncclConfig_t, blocking) == 16);
static_assert(offsetof(ncclConfig_t, maxCTAs) == 28);
static_assert(offsetof(ncclConfig_t, netName) == 32 && offsetof(ncclConfig_t, splitShare) == 40);

std::mutex last_error_lock;
std::string last_error;

void work(ncclComm *comm) {
    Mesh mesh(comm->name, comm->rank, comm->size, comm->stopped);
    ncclResult_t result = mesh.meet();
    comm->state = result;
    std::unique_lock<std::mutex> held(comm->lock);
    for (;;) {
        comm->changed.wait(held, [&] { return comm->over || comm->task; });
        if (!comm->task) {
            return;
        }
        const auto task = std::move(comm->task);
        comm->task = nullptr;
        held.unlock();
        result = task(mesh);
        held.lock();
        comm->state = result;
    }
}

ncclResult_t start(ncclComm_t *made, const std::string &name, int rank, int size, const ncclConfig_t *config) {
    if (config == nullptr || config->magic != MAGIC || config->size < CONFIG_BYTES || config->blocking != 0) {
        say("ncclCommInitRankConfig", "a configuration that was not made for calls that do not block");
        return ncclInvalidArgument;
    }
    auto *comm = new ncclComm;
    comm->name = name;
    comm->rank = rank;
    comm->size = size;
    comm->channels = config->maxCTAs == INT_MIN ? CHANNELS_MAX : std::min(config->maxCTAs, CHANNELS_MAX);
    comm->worker = std::thread(work, comm);
    *made = comm;
    return ncclInProgress;
}

ncclResult_t ask(ncclComm_t comm, std::function<ncclResult_t(Mesh &)> task) {
    const std::lock_guard<std::mutex> held(comm->lock);
    if (comm->state != ncclSuccess) {
        say("ncclGroupEnd", "the communicator has not done, or has failed, what it was asked for before");
        return ncclInvalidUsage;
    }
    comm->state = ncclInProgress;
    comm->task = std::move(task);
    comm->changed.notify_all();
    return ncclInProgress;
}

ncclResult_t end(ncclComm_t comm) {
    {
        const std::lock_guard<std::mutex> held(comm->lock);
        comm->over = true;
        comm->changed.notify_all();
    }
    comm->worker.join();
    delete comm;
    return ncclSuccess;
}

// Calls between ncclGroupStart and ncclGroupEnd of a thread.
struct Group {
    int depth = 0;
    ncclComm_t comm = nullptr;
    Exchange exchange;
    bool is_gathering = false;
};
thread_local Group group;

// A function of the stand-in for the driver; null where that is not loaded.
template <typename T> T driver(const char *name) {
    void *library = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<T>(dlsym(library, name));
}

// From now on the device waits for an exchange that never ends, or no longer.
void hold(int holds) {
    if (const auto function = driver<void (*)(int)>("stand_in_hold")) {
        function(holds);
    }
}

// Whether memory and stream are a device's: the driver is asked to copy the piece onto itself.
bool is_on_device(const void *memory, size_t bytes, cudaStream_t stream) {
    static const bool anywhere = number_setting("STAND_IN_NCCL_ANYWHERE", 0) != 0;
    const auto copy = driver<int (*)(unsigned long long, unsigned long long, size_t, cudaStream_t)>("cuMemcpyAsync");
    const auto address = reinterpret_cast<unsigned long long>(memory);
    return anywhere || (copy != nullptr && copy(address, address, bytes, stream) == 0);
}

ncclResult_t add(const char *function, bool sends, Piece piece, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    if (type != ncclInt8 || piece.peer < 0 || piece.peer >= comm->size) {
        say(function, "rank %d of %d, type %d", piece.peer, comm->size, int(type));
        return ncclInvalidArgument;
    }
    if (group.depth == 0 || (group.comm != nullptr && group.comm != comm)) {
        say(function, "a piece outside of a group, or of two communicators in one");
        return ncclInvalidUsage;
    }
    if (!is_on_device(piece.memory, piece.bytes, stream)) {
        say(function, "%zu bytes at %p are not a device's", piece.bytes, static_cast<void *>(piece.memory));
        return ncclInvalidArgument;
    }
    group.comm = comm;
    (sends ? group.exchange.sends : group.exchange.receives).push_back(piece);
    return ncclSuccess;
}

// Makes the missing buffers of channels; called when ranks first send each other something.
bool connect(ncclComm_t comm, const std::set<int> &peers) {
    const auto take = driver<int (*)(uint64_t)>("stand_in_take_library_memory");
    for (const int peer : peers) {
        if (peer == comm->rank || comm->size == 1 || !comm->connected.insert(peer).second) {
            continue;
        }
        const uint64_t bytes = comm->channels * number_setting("STAND_IN_NCCL_CHANNEL_BYTES", 12 << 20);
        if (take == nullptr || take(bytes) != 0) {
            remember("Failed to CUDA calloc " + std::to_string(bytes) + " bytes: out of memory");
            return false;
        }
    }
    return true;
}

// Records a call, if a test asks for a record.
void note(const char *what, size_t bytes) {
    const std::string path = setting("STAND_IN_EXCHANGES", "");
    if (!path.empty()) {
        std::ofstream(path, std::ios::app) << what + (" " + std::to_string(bytes)) + "\n";
    }
}

char *writable(const void *memory) { return const_cast<char *>(static_cast<const char *>(memory)); }

}  // namespace

void stand_in::remember(const std::string &reason) {
    const std::lock_guard<std::mutex> held(last_error_lock);
    last_error = reason;
}

extern "C" ncclResult_t ncclGetVersion(int *version) {
    *version = int(number_setting("STAND_IN_NCCL_VERSION", 23203));
    return ncclSuccess;
}

extern "C" const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}

extern "C" const char *ncclGetLastError(ncclComm_t) {
    const std::lock_guard<std::mutex> held(last_error_lock);
    static std::string told;
    told = last_error;
    return told.c_str();
}

extern "C" ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    const std::string made = std::to_string(getpid()) + "-" + std::to_string(std::random_device()());
    const std::string name = setting("NCCL_COMM_ID", made.c_str());
    std::memset(id, 0, sizeof *id);
    std::memcpy(id->internal, name.data(), std::min(name.size(), size_t{60}));
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    void *context = nullptr;
    const auto current = driver<int (*)(void **)>("cuCtxGetCurrent");
    if (current == nullptr || current(&context) != 0 || context == nullptr) {
        remember("no context is current");
        return ncclUnhandledCudaError;
    }
    if (rank < 0 || rank >= size) {
        return ncclInvalidArgument;
    }
    return start(comm, "nccl-stand-in/" + std::string(id.internal), rank, size, config);
}

extern "C" ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    *state = comm->state;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    return ask(comm, [](Mesh &) { return ncclSuccess; });
}

extern "C" ncclResult_t ncclCommDestroy(ncclComm_t comm) { return end(comm); }

extern "C" ncclResult_t ncclCommAbort(ncclComm_t comm) {
    hold(0);
    comm->stopped = true;
    return end(comm);
}

extern "C" ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) {
        return ncclInvalidUsage;
    }
    if (--group.depth > 0 || group.comm == nullptr) {
        return ncclSuccess;
    }
    const Group asked = std::move(group);
    group = Group{};
    std::set<int> peers;
    size_t bytes = 0;
    for (const Piece &piece : asked.exchange.sends) {
        peers.insert(piece.peer);
        bytes += piece.bytes;
    }
    for (const Piece &piece : asked.exchange.receives) {
        peers.insert(piece.peer);
    }
    if (!connect(asked.comm, asked.is_gathering ? std::set<int>{RING} : peers)) {
        return ncclUnhandledCudaError;
    }
    note(asked.is_gathering ? "gathering" : "exchange", bytes);
    // As with a rank that is gone without a word: queued, and never done.
    static uint64_t exchanges = 0;
    static const uint64_t endless = number_setting("STAND_IN_ENDLESS_EXCHANGE", 0);
    if (endless != 0 && ++exchanges >= endless) {
        hold(1);
        return ncclSuccess;
    }
    return ask(asked.comm, [exchange = asked.exchange](Mesh &mesh) { return mesh.exchange(exchange); });
}

extern "C" ncclResult_t ncclSend(
    const void *memory, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add("ncclSend", true, {peer, writable(memory), count}, type, comm, stream);
}

extern "C" ncclResult_t ncclRecv(
    void *memory, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add("ncclRecv", false, {peer, static_cast<char *>(memory), count}, type, comm, stream);
}

extern "C" ncclResult_t ncclAllGather(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    ncclGroupStart();
    group.is_gathering = true;
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < comm->size && result == ncclSuccess; peer++) {
        char *place = static_cast<char *>(to) + size_t(peer) * count;
        result = add("ncclAllGather", true, {peer, writable(from), count}, type, comm, stream);
        if (result == ncclSuccess) {
            result = add("ncclAllGather", false, {peer, place, count}, type, comm, stream);
        }
    }
    const ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}
