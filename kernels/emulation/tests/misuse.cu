// Kernels with the mistakes that the emulation must report, and beside each the same done right.
#include "../../mma.cuh"
#include "../../reduce.cuh"

// Half of the threads meet at one barrier, half at another.
extern "C" __global__ void two_barriers(int *out) {
    if (threadIdx.x < blockDim.x / 2) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}
EXPORT(two_barriers);

// The last thread leaves before the barrier.
extern "C" __global__ void left_early(int *out) {
    if (threadIdx.x + 1 == blockDim.x) {
        return;
    }
    __syncthreads();
    out[threadIdx.x] = 1;
}
EXPORT(left_early);

// Odd lanes take no part in a shuffle of the whole warp.
extern "C" __global__ void divergent_shuffle(int *out) {
    if (threadIdx.x % 2 == 0) {
        out[threadIdx.x] = __shfl_xor_sync(WHOLE_WARP, 1, 2);
    }
}
EXPORT(divergent_shuffle);

// The same with a mask of the lanes that take part; `distance` 1 reads lanes that do not.
extern "C" __global__ void masked_shuffle(int *out, int distance) {
    if (threadIdx.x % 2 == 0) {
        out[threadIdx.x] = __shfl_xor_sync(0x55555555u, int(threadIdx.x), distance);
    }
}
EXPORT(masked_shuffle);

// Every thread writes element `threadIdx.x + shift`, then reads its right neighbour's, across a barrier if `barrier`.
extern "C" __global__ void neighbours(int *out, int shift, int barrier) {
    SHARED(int, values, 64);
    values[int(threadIdx.x) + shift] = int(threadIdx.x);
    if (barrier) {
        __syncthreads();
    }
    out[threadIdx.x] = values[(threadIdx.x + 1) % 64];
}
EXPORT(neighbours);

// Reads without a barrier what will be written: whoever comes first, it is a race.
extern "C" __global__ void overtaken(int *out, int barrier) {
    SHARED(int, value, 1);
    if (threadIdx.x == 0) {
        value[0] = 1;
    }
    __syncthreads();
    out[threadIdx.x] = value[0];
    if (barrier) {
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        value[0] = 2;
    }
}
EXPORT(overtaken);

extern "C" __global__ void never_written(float *out) {
    SHARED(float, values, 32);
    out[threadIdx.x] = values[threadIdx.x];
}
EXPORT(never_written);

// Through an address, what was never written reads as NaN.
extern "C" __global__ void never_written_by_address(float *out) {
    SHARED(float, values, 32);
    out[threadIdx.x] = shared_pointer(values)[threadIdx.x];
}
EXPORT(never_written_by_address);

// Writes `count` elements of dynamic shared memory, by index or through the address.
extern "C" __global__ void dynamic(float *out, int count, int by_address) {
    DYNAMIC_SHARED(float, values);
    if (threadIdx.x == 0) {
        for (int i = 0; i < count; i++) {
            if (by_address) {
                shared_pointer(values)[i] = 1.0f;
            } else {
                values[i] = 1.0f;
            }
        }
        out[0] = 1.0f;
    }
}
EXPORT(dynamic);

// The result is whichever block comes last.
extern "C" __global__ void last_block(int *out) { out[0] = blockIdx.x; }
EXPORT(last_block);

extern "C" __global__ void too_much_static(int *out) {
    SHARED(double, values, 8000);
    values[0] = 1.0;
    out[0] = 1;
}
EXPORT(too_much_static);

extern "C" __global__ void wide_access(const float *x, float *out) {
    require_alignment(x, 16);
    out[0] = x[0];
}
EXPORT(wide_access);

// Votes, shuffles of every kind and atomics, one number of each into `out`.
extern "C" __global__ void conversation(int *out) {
    const int thread = threadIdx.x, lane = thread % WARP;
    int *own = out + 1 + thread * 9;
    own[0] = __shfl_sync(WHOLE_WARP, thread, 5);
    own[1] = __shfl_xor_sync(WHOLE_WARP, thread, 3);
    own[2] = __shfl_down_sync(WHOLE_WARP, thread, 2);
    own[3] = __shfl_up_sync(WHOLE_WARP, thread, 2, 8);
    own[4] = __popc(__ballot_sync(WHOLE_WARP, lane < 7));
    own[5] = __any_sync(WHOLE_WARP, thread == 40);
    own[6] = __all_sync(WHOLE_WARP, thread >= 32);
    own[7] = __syncthreads_or(thread == 40) + 2 * __syncthreads_and(thread < 40);
    __syncwarp();
    own[8] = block_reduce(thread, 0, Sum());
    atomicAdd(out, 1);
}
EXPORT(conversation);

// The sums of a product of ones, by all lanes or by all but one.
extern "C" __global__ void product(float *out, int lanes) {
    const uint32_t ones = 0x3f803f80, a[4] = {ones, ones, ones, ones}, b[2] = {ones, ones};
    float sums[4] = {};
    if (int(threadIdx.x) < lanes) {
        multiply_16x8x16(sums, a, b);
    }
    out[threadIdx.x] = sums[3];
}
EXPORT(product);

// The product of a 16 x 16 and a 16 x 8 matrix, whose elements are their own indices.
extern "C" __global__ void fragments(float *out) {
    SHARED(Chunk, chunks, 48);
    const int lane = threadIdx.x;
    for (int chunk = lane; chunk < 48; chunk += WARP) {
        alignas(16) bf16 elements[8];
        for (int i = 0; i < 8; i++) {
            elements[i] = narrow<bf16>(float(chunk % 32 * 8 + i));
        }
        chunks[chunk] = *reinterpret_cast<const Chunk *>(elements);
    }
    __syncwarp();
    uint32_t a[4], b[4];
    load_matrices<false>(a, chunks, lane % 16 * 2 + lane / 16);
    load_matrices<true>(b, chunks, 32 + lane % 16);
    float sums[4] = {};
    multiply_16x8x16(sums, a, {b[0], b[1]});
    for (int i = 0; i < 4; i++) {
        out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    }
}
EXPORT(fragments);

// Copies a chunk for each thread, and waits for it if `wait`, with `shift` elements of f32 off its place.
extern "C" __global__ void copies(float *out, const float *x, int shift, int wait) {
    SHARED(Chunk, chunks, 32);
    copy_async(chunks, int(threadIdx.x), reinterpret_cast<const Chunk *>(x + shift) + threadIdx.x);
    if (wait) {
        wait_for_copies();
    }
    __syncthreads();
    const Chunk chunk = chunks[31 - threadIdx.x];
    out[threadIdx.x] = reinterpret_cast<const float *>(&chunk)[1];
}
EXPORT(copies);
