// What every kernel source starts from: element types, conversion, shared memory, and the list of kernels.
//
// The same sources are compiled by NVRTC for the device and by a host compiler for the emulation, which is included
// before them and defines EMULATION.
#pragma once

#include <cuda_bf16.h>
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __bfloat162float(x); }

// Rounds to nearest, ties to even.
template <typename T> __device__ T narrow(float x);
template <> __device__ inline float narrow<float>(float x) { return x; }
template <> __device__ inline bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }

// 2^x. What is smaller than the normal numbers is 0, which saves the scaling that exp2f does for their sake.
__device__ inline float exp2_flushed(float x) {
#ifdef EMULATION
    const float power = exp2f(x);
    return power < FLT_MIN ? 0.0f : power;
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

#ifndef EMULATION

// Names a kernel for the emulation; the device finds kernels by their unmangled names.
#define EXPORT(name) static_assert(true, #name)

// `count` elements that the threads of a block share. Read and written by index; `shared_pointer` where an
// instruction needs the address.
#define SHARED(type, name, count) __shared__ type name[count]

// What `SHARED` declares, as a parameter.
template <typename T> using SharedArray = T *;

// All shared memory that the launch asked for, as elements of one type; once a kernel.
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    type *name = reinterpret_cast<type *>(dynamic_shared)

template <typename T> __device__ T *shared_pointer(T *array) { return array; }

// What a wide access must be; the emulation reports it where it is not.
template <typename T> __device__ void require_alignment(const T *, size_t) {}

#endif
