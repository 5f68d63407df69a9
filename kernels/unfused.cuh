// f32 whose products no compiler fuses with additions: the bits of the same formula on the CPU.
#pragma once

#include "kernel.cuh"

struct Unfused {
    float value;
};

__device__ inline Unfused operator+(Unfused a, Unfused b) { return {__fadd_rn(a.value, b.value)}; }
__device__ inline Unfused operator-(Unfused a, Unfused b) { return {__fsub_rn(a.value, b.value)}; }
__device__ inline Unfused operator*(Unfused a, Unfused b) { return {__fmul_rn(a.value, b.value)}; }
__device__ inline Unfused operator/(Unfused a, Unfused b) { return {__fdiv_rn(a.value, b.value)}; }
__device__ inline Unfused root(Unfused a) { return {__fsqrt_rn(a.value)}; }
