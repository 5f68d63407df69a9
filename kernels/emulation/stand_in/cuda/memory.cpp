// Blocks and pools, and the account of them. What a driver's own account does is not documented beyond its names, and
// not measured yet, so the stand-in is as strict as the documentation allows:
//
// - a block counts as used with its size rounded up to 512 bytes (STAND_IN_ROUNDING_BYTES);
// - a pool reserves whole pages of 2 MiB (STAND_IN_PAGE_BYTES) and never loses any to fragments;
// - a high mark that was reset reads as 0 until the next allocation.
//
// A block is 0xff, NaN in every type, when it is handed out. It ends where an unmapped page begins, and is unmapped
// when it is freed. The memory of the context counts as nothing: STAND_IN_OTHERS_BYTES can stand for it. Each loaded
// module counts as STAND_IN_MODULE_BYTES, by default nothing; each product of cuBLASLt, from its first use on, as
// STAND_IN_PRODUCT_BYTES.
#include "memory.h"
#include "graphs.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <sys/mman.h>

namespace stand_in {

static const size_t HOST_PAGE_BYTES = 4096, ALIGNMENT_BYTES = 512;

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// What a pool reserves at a time.
static uint64_t page_bytes() {
    static const uint64_t bytes = number_setting("STAND_IN_PAGE_BYTES", 2 << 20);
    return bytes;
}

// What a block counts as.
static uint64_t counted(uint64_t bytes) {
    static const uint64_t rounding = number_setting("STAND_IN_ROUNDING_BYTES", 512);
    return round_up(bytes, rounding);
}

// A count with its highest value since it was reset.
struct Mark {
    uint64_t now = 0, high = 0;

    void set(uint64_t bytes) {
        now = bytes;
        high = std::max(high, now);
    }
};

}  // namespace stand_in

struct CUmemPoolHandle_st {
    CUdevice device;
    uint64_t release_threshold = 0;
    stand_in::Mark used, reserved;

    // Gives back whole pages beyond what is used and what is to be kept.
    void trim(uint64_t keep) {
        const uint64_t needed = stand_in::round_up(std::max(used.now, keep), stand_in::page_bytes());
        reserved.now = std::min(reserved.now, needed);
    }
};

namespace stand_in {

struct Block {
    size_t bytes;
    // None for page-locked memory.
    CUmemoryPool pool;
};

static std::map<uintptr_t, Block> &blocks() {
    static std::map<uintptr_t, Block> blocks;
    return blocks;
}

static std::map<CUdevice, CUmemoryPool> &default_pools() {
    static std::map<CUdevice, CUmemoryPool> pools;
    return pools;
}

static const Block *block_of(const void *address, size_t bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    auto next = blocks().upper_bound(at);
    if (next == blocks().begin()) {
        return nullptr;
    }
    const auto &[start, block] = *--next;
    return at - start <= block.bytes && bytes <= block.bytes - (at - start) ? &block : nullptr;
}

bool is_device_memory(const void *address, size_t bytes) {
    const Block *block = block_of(address, bytes);
    return block != nullptr && block->pool != nullptr;
}

bool is_locked_memory(const void *address, size_t bytes) {
    const Block *block = block_of(address, bytes);
    return block != nullptr && block->pool == nullptr;
}

// Null if the system has no memory. Without computation it is not filled, so that its pages take no memory.
static void *add_block(size_t bytes, CUmemoryPool pool) {
    const size_t needed = round_up(bytes, ALIGNMENT_BYTES), mapped = round_up(needed, HOST_PAGE_BYTES);
    void *start = mmap(nullptr, mapped + HOST_PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start, mapped, PROT_READ | PROT_WRITE) != 0) {
        return nullptr;
    }
    char *block = static_cast<char *>(start) + (mapped - needed);
    if (!is_idle()) {
        std::memset(block, 0xff, bytes);
    }
    blocks()[reinterpret_cast<uintptr_t>(block)] = {bytes, pool};
    return block;
}

static void remove_block(uintptr_t address) {
    const uintptr_t start = address / HOST_PAGE_BYTES * HOST_PAGE_BYTES;
    const size_t mapped = round_up(address - start + blocks()[address].bytes, HOST_PAGE_BYTES);
    munmap(reinterpret_cast<void *>(start), mapped + HOST_PAGE_BYTES);
    blocks().erase(address);
}

static uint64_t total_bytes() {
    static const uint64_t total = number_setting("STAND_IN_TOTAL_BYTES", uint64_t(80) << 30);
    return total;
}

// Memory of each device that modules and graphs hold while they live, and libraries until the process ends.
static std::map<CUdevice, uint64_t> &loaded_bytes() {
    static std::map<CUdevice, uint64_t> bytes;
    return bytes;
}

// Free memory of a device.
static uint64_t free_bytes(CUdevice device) {
    uint64_t held = number_setting("STAND_IN_OTHERS_BYTES", 0) + loaded_bytes()[device];
    for (const CUmemoryPool pool : alive<CUmemPoolHandle_st>()) {
        held += pool->device == device ? pool->reserved.now : 0;
    }
    return total_bytes() - std::min(total_bytes(), held);
}

CUresult take_memory(uint64_t bytes) {
    const CUdevice device = current_context()->device;
    if (bytes > free_bytes(device)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    loaded_bytes()[device] += bytes;
    return CUDA_SUCCESS;
}

void give_back_memory(uint64_t bytes) { loaded_bytes()[current_context()->device] -= bytes; }

// Writes down how much the pools of this process have in use when a library loads code, a line each time.
static void note_first_use() {
    const std::string path = setting("STAND_IN_FIRST_USES", "");
    if (path.empty()) {
        return;
    }
    uint64_t used = 0;
    for (const CUmemoryPool pool : alive<CUmemPoolHandle_st>()) {
        used += pool->used.now;
    }
    std::ofstream(path, std::ios::app) << used << '\n';
}

// Whether STAND_IN_FAIL_ALLOCATIONS, a comma list of numbers from 1, names the allocation that is now asked for.
static bool is_to_fail() {
    static uint64_t asked = 0;
    const std::string list = "," + setting("STAND_IN_FAIL_ALLOCATIONS", "") + ",";
    return list.find("," + std::to_string(++asked) + ",") != std::string::npos;
}

void release_unused() {
    for (const CUmemoryPool pool : alive<CUmemPoolHandle_st>()) {
        pool->trim(pool->release_threshold);
    }
}

void report_what_is_left() {
    const size_t left[] = {blocks().size(),
                           alive<CUmemPoolHandle_st>().size() - default_pools().size(),
                           alive<CUstream_st>().size(),
                           alive<CUevent_st>().size(),
                           alive<CUgraph_st>().size() + alive<CUgraphExec_st>().size(),
                           alive<CUmod_st>().size()};
    const char *names[] = {"blocks", "pools", "streams", "events", "graphs", "modules"};
    for (size_t kind = 0; kind < 6; kind++) {
        if (left[kind] != 0) {
            say("exit", "%zu %s are left", left[kind], names[kind]);
        }
    }
}

bool has_loaded_code(CUdevice device) { return loaded_bytes()[device] != 0; }

}  // namespace stand_in

using namespace stand_in;

extern "C" int stand_in_take_library_memory(uint64_t bytes) {
    STAND_IN_ENTER(ready("cuBLASLt"));
    note_first_use();
    return take_memory(bytes);
}

extern "C" CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    STAND_IN_ENTER(ready("cuMemGetInfo"));
    *free = free_bytes(current_context()->device);
    *total = total_bytes();
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                                  CUmemAllocationGranularity_flags option) {
    STAND_IN_ENTER(ready("cuMemGetAllocationGranularity"));
    const bool known = properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                       properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                       option == CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    *bytes = 2 << 20;
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

extern "C" CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    STAND_IN_ENTER(ready("cuMemPoolCreate"));
    const bool known = properties->allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
                       properties->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
                       properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                       size_t(properties->location.id) < contexts().size() && properties->maxSize == 0;
    if (!known) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (number_setting("STAND_IN_POOLS", 1) == 0) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    *pool = new CUmemPoolHandle_st{properties->location.id, 0, {}, {}};
    alive<CUmemPoolHandle_st>().insert(*pool);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    STAND_IN_ENTER(ready("cuMemPoolDestroy", pool));
    if (pool->used.now != 0) {
        say("cuMemPoolDestroy", "%llu bytes of the pool are in use", static_cast<unsigned long long>(pool->used.now));
    }
    alive<CUmemPoolHandle_st>().erase(pool);
    delete pool;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    STAND_IN_ENTER(ready("cuMemPoolTrimTo", pool));
    pool->trim(keep);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    STAND_IN_ENTER(ready("cuMemPoolSetAttribute", pool));
    const auto reset = [value](Mark &mark) {
        if (*static_cast<uint64_t *>(value) != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        mark.high = 0;
        return CUDA_SUCCESS;
    };
    switch (attribute) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
            pool->release_threshold = std::min(*static_cast<uint64_t *>(value), total_bytes());
            return CUDA_SUCCESS;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: return reset(pool->used);
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: return reset(pool->reserved);
        // The stand-in never reuses memory early, so these settings change nothing.
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: return CUDA_SUCCESS;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

extern "C" CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    STAND_IN_ENTER(ready("cuMemPoolGetAttribute", pool));
    uint64_t &bytes = *static_cast<uint64_t *>(value);
    switch (attribute) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: bytes = pool->release_threshold; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: bytes = pool->reserved.now; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: bytes = pool->reserved.high; break;
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: bytes = pool->used.now; break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: bytes = pool->used.high; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult take(CUdeviceptr *address, size_t bytes, CUmemoryPool pool) {
    if (bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const uint64_t used = pool->used.now + counted(bytes);
    const uint64_t reserved = std::max(pool->reserved.now, round_up(used, page_bytes()));
    if (is_to_fail() || reserved - pool->reserved.now > free_bytes(pool->device)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    void *block = add_block(bytes, pool);
    if (block == nullptr) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool->used.set(used);
    pool->reserved.set(reserved);
    *address = reinterpret_cast<CUdeviceptr>(block);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemAllocFromPoolAsync", stream));
    STAND_IN_CHECK(ready("cuMemAllocFromPoolAsync", pool));
    STAND_IN_CHECK(not_captured("cuMemAllocFromPoolAsync"));
    return take(address, bytes, pool);
}

// The pool that a device has without anybody's making one. It lives as long as the process.
static CUmemoryPool default_pool() {
    CUmemoryPool &pool = default_pools()[current_context()->device];
    if (pool == nullptr) {
        pool = new CUmemPoolHandle_st{current_context()->device, 0, {}, {}};
        alive<CUmemPoolHandle_st>().insert(pool);
    }
    return pool;
}

extern "C" CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemAllocAsync", stream));
    return cuMemAllocFromPoolAsync(address, bytes, default_pool(), stream);
}

extern "C" CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    STAND_IN_ENTER(ready("cuMemAlloc_v2"));
    STAND_IN_CHECK(not_captured("cuMemAlloc_v2"));
    return take(address, bytes, default_pool());
}

// Unlike memory of a pool, its pages are free at once.
extern "C" CUresult cuMemFree_v2(CUdeviceptr address) {
    wait_while_held();
    STAND_IN_ENTER(ready("cuMemFree_v2"));
    STAND_IN_CHECK(not_captured("cuMemFree_v2"));
    STAND_IN_CHECK(catch_up_all());
    const auto found = blocks().find(uintptr_t(address));
    if (found == blocks().end() || found->second.pool != default_pool()) {
        say("cuMemFree_v2", "the address is not that of a block");
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUmemoryPool pool = found->second.pool;
    pool->used.now -= counted(found->second.bytes);
    pool->reserved.now = round_up(pool->used.now, page_bytes());
    remove_block(uintptr_t(address));
    return CUDA_SUCCESS;
}

extern "C" CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    STAND_IN_ENTER(ready_on("cuMemFreeAsync", stream));
    STAND_IN_CHECK(not_captured("cuMemFreeAsync"));
    const auto found = blocks().find(uintptr_t(address));
    if (found == blocks().end() || found->second.pool == nullptr) {
        say("cuMemFreeAsync", "the address is not that of a block");
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto work = [address, pool = found->second.pool] {
        pool->used.now -= counted(blocks()[uintptr_t(address)].bytes);
        remove_block(uintptr_t(address));
        return CUDA_SUCCESS;
    };
    return captures(stream, work) ? CUDA_SUCCESS : work();
}

extern "C" CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int) {
    STAND_IN_ENTER(ready("cuMemHostAlloc"));
    STAND_IN_CHECK(not_captured("cuMemHostAlloc"));
    if (bytes == 0 || bytes > number_setting("STAND_IN_LOCKED_BYTES_MAX", UINT64_MAX)) {
        return bytes == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *address = add_block(bytes, nullptr);
    return *address != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

extern "C" CUresult cuMemAllocHost_v2(void **address, size_t bytes) { return cuMemHostAlloc(address, bytes, 0); }

extern "C" CUresult cuMemFreeHost(void *address) {
    wait_while_held();
    STAND_IN_ENTER(ready("cuMemFreeHost"));
    STAND_IN_CHECK(not_captured("cuMemFreeHost"));
    STAND_IN_CHECK(catch_up_all());
    const auto found = blocks().find(reinterpret_cast<uintptr_t>(address));
    if (found == blocks().end() || found->second.pool != nullptr) {
        say("cuMemFreeHost", "the address is not that of page-locked memory");
        return CUDA_ERROR_INVALID_VALUE;
    }
    remove_block(found->first);
    return CUDA_SUCCESS;
}
