// What the stand-in uses of NVIDIA's nccl.h. With NVIDIA_HEADERS it is that header itself: `scripts/check-nccl` compiles the
// stand-in so.
#pragma once

#include <cstddef>

#ifdef NVIDIA_HEADERS
#include <nccl.h>
#else

extern "C" {

typedef struct CUstream_st *cudaStream_t;
typedef struct ncclComm *ncclComm_t;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

typedef enum { ncclInt8 = 0 } ncclDataType_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

// As that of 2.18; later ones have more behind it.
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
} ncclConfig_t;

}  // extern "C"

#endif
