// What the stand-in uses of NVIDIA's nvml.h. With NVIDIA_HEADERS it is that header itself: `scripts/check-cuda-sources`
// compiles the stand-in so.
#pragma once

#ifdef NVIDIA_HEADERS
// Without it, the header calls some functions by the names of their later versions; here they are called by those.
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#else

extern "C" {

typedef struct nvmlDevice_st *nvmlDevice_t;

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
} nvmlReturn_t;

typedef enum { NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2 } nvmlClockType_t;
typedef enum { NVML_TEMPERATURE_GPU = 0 } nvmlTemperatureSensors_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

}  // extern "C"

#endif
