// Instructions of compute capability 9.0 alone (`sm_90a`): thin wrappers. The emulation has none of them; the interpreter of PTX
// (`crates/ptx`) runs them. Formulas for layouts are those of the PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate
// Instructions".
//
// A group is 128 threads whose first is a multiple of 128. All of it call `wgmma_...` and `..._registers` together. Shared memory is
// named by 32-bit addresses.
#pragma once

#include "mma.cuh"

constexpr int GROUP = 4 * WARP;

// A barrier is 8 bytes of shared memory. A phase of it is over when as many have arrived as it counts, and the next one begins;
// phases have parities 0, 1, 0, ...
__device__ inline void init_barrier(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After the block's barriers are initialised, before the other threads are let through to them.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when all copies are there that this thread has asked for.
__device__ inline void arrive_with_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until a phase of this parity is over. On a fresh barrier the wait for parity 1 ends at once.
__device__ inline void wait_for_phase(uint32_t barrier, uint32_t parity) {
    uint32_t is_over;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!is_over);
}

// Copies 16 bytes to shared memory asynchronously. Of what does not exist nothing is read, and zeros are written.
__device__ inline void copy_chunk(uint32_t to, const void *from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

__device__ inline void store_chunk(uint32_t to, Chunk chunk) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w)
                 : "memory");
}

__device__ inline void store_element(uint32_t to, bf16 element) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(*reinterpret_cast<const uint16_t *>(&element)) : "memory");
}

__device__ inline void store_number(uint32_t to, float number) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(number) : "memory");
}
__device__ inline float load_number(uint32_t from) {
    float number;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(number) : "r"(from) : "memory");
    return number;
}

// Products read shared memory through the asynchronous proxy. Makes what this thread wrote there, or waited for, visible to products that are
// asked for later.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers, 1 to 15. `threads` counts those that wait and those that only arrive.
__device__ inline void wait_for_groups(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive_at_groups(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A group gives registers to the others of its block, or takes them: the numbers of all groups add up to what they began with.
template <int COUNT> __device__ inline void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Matrices of bf16 that products read lie in panels of shared memory, which begin at multiples of 1,024 bytes. A line of a panel is 128
// bytes: 64 elements, in eight chunks.
constexpr int LINE_BYTES = 128, LINE_ELEMENTS = 64, LINE_CHUNKS = 8, CHUNK_BYTES = 16;

// Where a chunk of a line lies in a panel, in bytes. Chunks of each line are exchanged among themselves, in another way for each of eight
// lines, so that reads of one chunk of all eight are in different banks ("128-byte swizzle").
__device__ inline int panel_offset(int line, int chunk) { return line * LINE_BYTES + (chunk ^ line % 8) * CHUNK_BYTES; }

// The matrix descriptor of a factor that begins at an address in a panel. `panel_bytes` are from a panel to the next, which matters where
// lines are places of the depth.
__device__ inline uint64_t descriptor(uint32_t address, uint32_t panel_bytes) {
    constexpr uint64_t SWIZZLED_BY_128 = uint64_t(1) << 62, EIGHT_LINES = 8 * LINE_BYTES;
    return SWIZZLED_BY_128 | EIGHT_LINES >> 4 << 32 | uint64_t(panel_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Sums of 64 rows are `float [N][4]`: of N eights of columns, warp w of a group has 16 rows from 16 w on, as `mma.cuh` says of one.

// The compiler neither moves sums over this nor keeps copies of them: around products, which write them later.
template <int N> __device__ inline void pin(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
    }
}

// A left factor's 64 rows at sixteen places of the depth, which lie as two eights of sums do, in pairs of bf16.
typedef uint32_t Sixteen[4];

// The same for left factors, which products read later.
template <int N> __device__ inline void pin(Sixteen (&factors)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+r"(factors[n][0]), "+r"(factors[n][1]), "+r"(factors[n][2]), "+r"(factors[n][3])::"memory");
    }
}

// Before products whose sums this thread has touched since the last ones.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products since the last call become one for `wgmma_wait`, which waits for all but the newest UNDER_WAY of these.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int UNDER_WAY> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(UNDER_WAY) : "memory");
}

#define SUMS_4(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define SUMS_8(n) SUMS_4(n), SUMS_4(n + 1)
#define SUMS_32(n) SUMS_8(n), SUMS_8(n + 2), SUMS_8(n + 4), SUMS_8(n + 6)

// The operands of a product of so many columns: sums, which are the first ones of the instruction.
#define SUMS_OF_64 SUMS_32(0)
#define SUMS_OF_80 SUMS_32(0), SUMS_8(8)
#define SUMS_OF_96 SUMS_32(0), SUMS_8(8), SUMS_8(10)
#define SUMS_OF_112 SUMS_32(0), SUMS_8(8), SUMS_8(10), SUMS_8(12)
#define SUMS_OF_128 SUMS_32(0), SUMS_32(8)
#define SUMS_OF_192 SUMS_32(0), SUMS_32(8), SUMS_32(16)
#define SUMS_OF_256 SUMS_32(0), SUMS_32(8), SUMS_32(16), SUMS_32(24)
#define NUMBERS_OF_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_OF_80 NUMBERS_OF_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NUMBERS_OF_96 NUMBERS_OF_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_OF_112 NUMBERS_OF_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NUMBERS_OF_128 NUMBERS_OF_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_OF_192 NUMBERS_OF_128 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NUMBERS_OF_256 NUMBERS_OF_192 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// sums = [sums +] a [64, 16] b [COLUMNS, 16]^T, asynchronously. BY_DEPTH: a line of the factor has its elements at one place of the depth.
// `a` is in shared memory, or in registers. The other parameters are the numbers of the operands behind the sums.
#define GROUP_PRODUCT(COLUMNS, N0, N1, N2, N3, N4, N5, N6)                                                              \
    template <bool A_BY_DEPTH, bool B_BY_DEPTH>                                                                        \
    __device__ inline void wgmma(float (&sums)[COLUMNS / 8][4], uint64_t a, uint64_t b, bool adds = true) {            \
        asm volatile("{ .reg .pred adds; setp.ne.u32 adds, " N2 ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS      \
                     "k16.f32.bf16.bf16 {" NUMBERS_OF_##COLUMNS "}, " N0 ", " N1 ", adds, 1, 1, " N3 ", " N4 "; }"      \
                     : SUMS_OF_##COLUMNS                                                                               \
                     : "l"(a), "l"(b), "r"(int(adds)), "n"(A_BY_DEPTH), "n"(B_BY_DEPTH));                              \
    }                                                                                                                  \
    template <bool B_BY_DEPTH>                                                                                         \
    __device__ inline void wgmma(float (&sums)[COLUMNS / 8][4], const Sixteen &a, uint64_t b, bool adds = true) {      \
        asm volatile("{ .reg .pred adds; setp.ne.u32 adds, " N5 ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS      \
                     "k16.f32.bf16.bf16 {" NUMBERS_OF_##COLUMNS "}, {" N0 ", " N1 ", " N2 ", " N3 "}, " N4             \
                     ", adds, 1, 1, " N6 "; }"                                                                         \
                     : SUMS_OF_##COLUMNS                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(B_BY_DEPTH));           \
    }

GROUP_PRODUCT(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
GROUP_PRODUCT(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
GROUP_PRODUCT(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
GROUP_PRODUCT(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
GROUP_PRODUCT(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
GROUP_PRODUCT(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
GROUP_PRODUCT(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// Stages in shared memory, which one part of a block fills and others free; all go round in the same order.
template <int STAGES, int STAGE_BYTES> struct Ring {
    static constexpr int BYTES = STAGES * STAGE_BYTES, BARRIER_BYTES = 2 * 8 * STAGES;

    uint32_t stages, barriers;
    int stage = 0;
    // Changes with every round.
    uint32_t parity = 0;

    __device__ uint32_t address() const { return stages + stage * STAGE_BYTES; }
    __device__ uint32_t full_barrier() const { return barriers + 8 * stage; }
    __device__ uint32_t free_barrier() const { return full_barrier() + 8 * STAGES; }
    __device__ void advance() {
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        parity ^= stage == 0;
    }
    // One thread does this. A stage is full when so many have arrived, and free when so many warps no longer read it.
    __device__ void init_barriers(int fillers, int readers) const {
        for (Ring ring = *this; ring.stage < STAGES; ring.stage++) {
            init_barrier(ring.full_barrier(), fillers);
            init_barrier(ring.free_barrier(), readers);
        }
        publish_barriers();
    }
};

// Says that this warp's products no longer read a stage. Without a branch, after which the other lanes might go on alone.
__device__ inline void free_stage(uint32_t free_barrier) {
    asm volatile("{ .reg .pred first; setp.eq.s32 first, %1, 0; @first mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(free_barrier),
                 "r"(threadIdx.x % WARP)
                 : "memory");
}
