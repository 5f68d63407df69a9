// Launches by name. Blocks of a launch run one after the other.
#include "launch.h"
#include "block.h"

#include <algorithm>
#include <map>

namespace emulation {

static std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> kernels;
    return kernels;
}

void add_kernel(const char *name, const Kernel &kernel) { kernels()[name] = kernel; }

const Kernel *kernel_of(const std::string &name) {
    const auto found = kernels().find(name);
    return found != kernels().end() ? &found->second : nullptr;
}

// Why a kernel is not the one that the caller expects; empty if it is.
static std::string mistake(const Kernel &kernel, const std::string &source, const std::string &arguments) {
    const std::string path = kernel.file, file = path.substr(path.find_last_of('/') + 1);
    if (file != source + ".cu") {
        return "comes from `" + file + "`, not from `" + source + ".cu`";
    }
    if (kernel.parameters != arguments) {
        return "called with arguments `" + arguments + "`, its parameters are `" + kernel.parameters + "`";
    }
    return "";
}

std::string refusal(uint3 grid, uint3 block, size_t shared_bytes) {
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (threads == 0 || threads > 1024 || block.z > 64) {
        return "a block of " + std::to_string(threads) + " threads";
    }
    const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0;
    if (empty || grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff) {
        return "a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
               std::to_string(grid.z) + " blocks";
    }
    if (shared_bytes > SHARED_BYTES_MAX) {
        return std::to_string(shared_bytes) + " bytes of dynamic shared memory";
    }
    return "";
}

static std::vector<Thread> threads_of(uint3 block) {
    std::vector<Thread> threads;
    for (unsigned z = 0; z < block.z; z++) {
        for (unsigned y = 0; y < block.y; y++) {
            for (unsigned x = 0; x < block.x; x++) {
                threads.emplace_back();
                threads.back().index = {x, y, z};
                threads.back().number = unsigned(threads.size() - 1);
            }
        }
    }
    return threads;
}

// Half of the launches, chosen irregularly, run blocks and threads from the last to the first, so that a result that
// depends on their order changes. Every run of a program chooses the same launches.
static bool is_reversed() {
    static thread_local uint64_t launches = 0;
    const uint64_t fraction_of_golden_ratio = 0x9e3779b97f4a7c15;
    return (launches++ * fraction_of_golden_ratio) >> 63;
}

uint3 block_of(uint64_t number) {
    const uint3 grid = gridDim;
    return {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
}

std::string run(const Kernel &kernel, uint3 grid, uint3 block, size_t shared_bytes, void **arguments) {
    static thread_local std::unique_ptr<Block> of_this_thread(new Block);
    Block &running = *of_this_thread;
    const bool reversed = is_reversed();
    gridDim = grid;
    blockDim = block;
    running.threads = threads_of(block);
    running.begin_launch(kernel, arguments);
    current_block = &running;
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    running.error.clear();
    for (uint64_t turn = 0; turn < blocks && running.error.empty(); turn++) {
        const uint64_t number = reversed ? blocks - 1 - turn : turn;
        blockIdx = block_of(number);
        running.begin_block(number, shared_bytes);
        running.run(reversed);
    }
    current_block = nullptr;
    return running.error;
}

}  // namespace emulation

// Runs a kernel of a source file to its end. `arguments` are addresses, `letters` their kinds. Returns 0, or 1 with a
// message.
extern "C" int emulation_launch(const char *source, const char *name, const uint32_t *grid, const uint32_t *block,
                                uint32_t shared_bytes, const char *letters, void **arguments, char *message,
                                size_t message_bytes) {
    using namespace emulation;
    std::string error = "there is no kernel of this name";
    if (const Kernel *kernel = kernel_of(name)) {
        const uint3 blocks = {grid[0], grid[1], grid[2]}, threads = {block[0], block[1], block[2]};
        error = mistake(*kernel, source, letters);
        error = error.empty() ? refusal(blocks, threads, shared_bytes) : error;
        error = error.empty() ? run(*kernel, blocks, threads, shared_bytes, arguments) : error;
    }
    if (error.empty()) {
        return 0;
    }
    const size_t length = std::min(error.size(), message_bytes - 1);
    std::copy(error.begin(), error.begin() + long(length), message);
    message[length] = 0;
    return 1;
}
