// Tensor cores and what feeds them: thin wrappers around PTX instructions, named after what they do. The emulation
// has each of them too, from the same tables of the PTX ISA ("Matrix Fragments for mma.m16n8k16", "ldmatrix").
//
// All lanes of a warp call the first three together. Lane 4 g + t holds, of a 16 x 16 factor, rows g and g + 8 of
// columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9; of a 16 x 8 factor, the same rows' columns, transposed; of the 16 x 8
// sums, columns 2 t and 2 t + 1 of row g and then of row g + 8.
#pragma once

#include "kernel.cuh"

// 16 bytes, which are loaded, stored and copied as one: all shared memory that these instructions use is made of them.
typedef uint4 Chunk;

#ifdef EMULATION

template <typename T> using SharedElements = emulation::Shared<T>;

inline void multiply_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATION_PLACE) {
    emulation::multiply_16x8x16(sums, a, b, {file, line});
}

template <bool TRANSPOSED>
void load_matrices(uint32_t (&matrices)[4], SharedElements<Chunk> chunks, int index, EMULATION_PLACE) {
    const Chunk row = chunks[emulation::Index(index, file, line)];
    emulation::load_matrices(matrices, {row.x, row.y, row.z, row.w}, TRANSPOSED, {file, line});
}

template <typename T>
void copy_async(SharedElements<T> to, int index, const T *from, bool exists = true, EMULATION_PLACE) {
    if (exists) {
        emulation::copy_later(to.array, index, from, {file, line});
    } else {
        to[emulation::Index(index, file, line)] = T{};
    }
}

inline void close_copy_group() { emulation::close_copy_group(); }
template <int UNDER_WAY> void wait_for_copy_groups() { emulation::finish_copies(UNDER_WAY); }
inline void wait_for_copies() {
    close_copy_group();
    wait_for_copy_groups<0>();
}

#else

template <typename T> using SharedElements = T *;

// Adds the product of bf16 matrices of 16 x 16 and 16 x 8 to f32 sums.
__device__ inline void multiply_16x8x16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline uint32_t shared_address(const void *pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Four 8 x 8 matrices of 16-bit elements: lane l names the chunk that is row l % 8 of matrix l / 8, and receives of
// each its part of a fragment; transposed, rows are exchanged with columns.
template <bool TRANSPOSED>
__device__ inline void load_matrices(uint32_t (&matrices)[4], SharedElements<Chunk> chunks, int index) {
    const uint32_t address = shared_address(chunks + index);
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                     : "r"(address)
                     : "memory");
    }
}

// Copies an element of 4, 8 or 16 bytes from global to shared memory while the thread goes on; it is there for this
// thread after `wait_for_copies`, and for others after a barrier that follows. Of what does not exist nothing is read,
// and zeros are stored.
template <typename T>
__device__ inline void copy_async(SharedElements<T> to, int index, const T *from, bool exists = true) {
    const uint32_t address = shared_address(to + index), given = exists ? sizeof(T) : 0;
    if constexpr (sizeof(T) == 16) {
        // Past the first-level cache: a block uses it once.
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(given) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(sizeof(T)), "r"(given)
                     : "memory");
    }
}

// What a thread has asked for since the last call becomes a group. There may be nothing in it.
__device__ inline void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits, as `wait_for_copies` does, for all groups but the newest UNDER_WAY.
template <int UNDER_WAY> __device__ inline void wait_for_copy_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif
