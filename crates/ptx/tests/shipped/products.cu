// A product of bf16 as kernels for Hopper compute one: a group of warps copies tiles into a ring, two multiply them. The test
// writes `multiply`, whose 64 operands are many words.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
typedef unsigned u32;
typedef unsigned long long u64;

__device__ void init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
__device__ void init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ void copy(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 16;" ::"r"(to), "l"(from) : "memory"); }
__device__ void arrive_with_copies(u32 barrier) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory"); }
__device__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ void product_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

__device__ void wait(u32 barrier, u32 parity) {
    u32 is_over;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over) : "r"(barrier), "r"(parity) : "memory");
    } while (!is_over);
}

// Nothing moves the sums over a fence or a wait.
__device__ void keep(float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

MULTIPLY

constexpr u32 ROWS = 128, COLUMNS = 128, DEPTH = 64, STAGES = 2, PANEL = DEPTH * 128, TILE = ROWS * DEPTH * 2;

__device__ u32 swizzled(u32 address) { return address ^ ((address >> 3) & 0x70); }

__device__ u64 descriptor(u32 address, u32 leading) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// out [128, 128] = a [128, depth] b [depth, 128]
extern "C" __global__ void __launch_bounds__(384, 1) product(float* out, const unsigned short* a, const unsigned short* b, int depth) {
    extern __shared__ __align__(1024) unsigned char raw[];
    const u32 base = (u32)__cvta_generic_to_shared(raw), full = base + STAGES * 2 * TILE, free = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            init(full + 8 * stage, 128);
            init(free + 8 * stage, 8);
        }
        init_fence();
    }
    __syncthreads();
    const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128, steps = depth / DEPTH;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (u32 step = 0; step < steps; step++) {
            const u32 stage = step % STAGES, left = base + stage * 2 * TILE, right = left + TILE;
            wait(free + 8 * stage, (step / STAGES + 1) % 2);
            for (u32 row = thread / 8; row < ROWS; row += 16) {
                const u32 chunk = thread % 8;
                copy(swizzled(left + row * 128 + chunk * 16), a + row * depth + step * DEPTH + chunk * 8);
            }
            for (u32 k = thread / 16; k < DEPTH; k += 8) {
                const u32 chunk = thread % 16;
                copy(swizzled(right + chunk / 8 * PANEL + k * 128 + chunk % 8 * 16), b + (step * DEPTH + k) * COLUMNS + chunk * 8);
            }
            arrive_with_copies(full + 8 * stage);
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sums[64];
    for (u32 step = 0; step < steps; step++) {
        const u32 stage = step % STAGES, left = base + stage * 2 * TILE + (group - 1) * 64 * 128, right = base + stage * 2 * TILE + TILE;
        wait(full + 8 * stage, step / STAGES % 2);
        proxy_fence();
        keep(sums);
        product_fence();
#pragma unroll
        for (u32 k = 0; k < 4; k++) multiply(sums, descriptor(left + k * 32, 16), descriptor(right + k * 2048, PANEL), step + k > 0);
        product_commit();
        product_wait();
        keep(sums);
        if (thread % 32 == 0) arrive(free + 8 * stage);
    }
#pragma unroll
    for (u32 i = 0; i < 64; i++) {
        const u32 row = (group - 1) * 64 + thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
        out[row * COLUMNS + i / 4 * 8 + thread % 4 * 2 + i % 2] = sums[i];
    }
}
#endif
