// The logistic function.
#pragma once
#include "kernel.cuh"

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
