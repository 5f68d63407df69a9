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

// The result is the order of the blocks: no race, but none that a device promises.
extern "C" __global__ void queue_of_blocks(int *out) {
    const int place = atomicAdd(out, 1);
    out[1 + place] = blockIdx.x;
}
EXPORT(queue_of_blocks);

// What a block does with the element that another block uses as well.
enum Use { READS, WRITES, ADDS, ADDS_ATOMICALLY };

__device__ inline void use(int *element, int how) {
    switch (how) {
        case READS: element[1 + blockIdx.x] = *element; break;
        case WRITES: *element = 1; break;
        case ADDS: *element += 1; break;
        default: atomicAdd(element, 1);
    }
}

// Block 0 uses an element in one way, block 1 in another.
extern "C" __global__ void two_blocks(int *out, int first, int second) { use(out, blockIdx.x == 0 ? first : second); }
EXPORT(two_blocks);

// Both blocks read an element, then one of them writes it.
extern "C" __global__ void reads_before_a_write(int *out) {
    const int seen = out[0];
    out[1 + blockIdx.x] = seen;
    if (blockIdx.x == 1) {
        out[0] = seen + 1;
    }
}
EXPORT(reads_before_a_write);

template <typename T> __device__ void write_at(unsigned char *out, int byte) {
    *reinterpret_cast<T *>(out + byte) = T();
}

// Block 0 writes 16 bytes from byte 16 on, block 1 so many as `bytes` says from `start` on.
extern "C" __global__ void wide_and_narrow(unsigned char *out, int start, int bytes) {
    if (blockIdx.x == 0) {
        write_at<uint4>(out, 16);
        return;
    }
    switch (bytes) {
        case 1: write_at<uint8_t>(out, start); break;
        case 2: write_at<uint16_t>(out, start); break;
        case 4: write_at<float>(out, start); break;
        default: write_at<uint2>(out, start);
    }
}
EXPORT(wide_and_narrow);

// How the threads of a block meet between two accesses.
enum Meeting { NONE, WARPS, BLOCK };

__device__ inline void meet(int meeting) {
    if (meeting == WARPS) {
        __syncwarp();
    } else if (meeting == BLOCK) {
        __syncthreads();
    }
}

// Every thread writes its element, then reads that of the thread `distance` on.
extern "C" __global__ void through_global_memory(int *out, int distance, int meeting) {
    out[threadIdx.x] = threadIdx.x;
    meet(meeting);
    out[blockDim.x + threadIdx.x] = out[(threadIdx.x + distance) % blockDim.x];
}
EXPORT(through_global_memory);

// All threads read an element, then one of them writes it.
extern "C" __global__ void written_by_a_reader(int *out, int writer, int meeting) {
    const int seen = out[0];
    meet(meeting);
    if (int(threadIdx.x) == writer) {
        out[0] = seen + 1;
    }
}
EXPORT(written_by_a_reader);

// All threads add to an element, and one reads the sum.
extern "C" __global__ void sum_of_a_block(int *out, int meeting) {
    atomicAdd(out, 1);
    meet(meeting);
    if (threadIdx.x == 0) {
        out[1] = out[0];
    }
}
EXPORT(sum_of_a_block);

// Thread 0 copies a chunk of `out`, which thread 1 writes before the copy is waited for, or after.
extern "C" __global__ void source_of_a_copy(float *out, int waits_first) {
    SHARED(Chunk, chunk, 1);
    if (threadIdx.x == 0) {
        copy_async(chunk, 0, reinterpret_cast<const Chunk *>(out));
        if (waits_first) {
            wait_for_copies();
        }
    }
    __syncthreads();
    if (threadIdx.x == 1) {
        out[3] = 1.0f;
    }
    __syncthreads();
    if (!waits_first) {
        wait_for_copies();
    }
}
EXPORT(source_of_a_copy);

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
