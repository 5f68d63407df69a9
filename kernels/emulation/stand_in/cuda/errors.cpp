// Errors by name.
#include "driver_api.h"

#define CASE(error) \
    case error: return #error

static const char *name_of(CUresult error) {
    switch (error) {
        CASE(CUDA_SUCCESS);
        CASE(CUDA_ERROR_INVALID_VALUE);
        CASE(CUDA_ERROR_OUT_OF_MEMORY);
        CASE(CUDA_ERROR_NOT_INITIALIZED);
        CASE(CUDA_ERROR_DEVICE_UNAVAILABLE);
        CASE(CUDA_ERROR_NO_DEVICE);
        CASE(CUDA_ERROR_INVALID_DEVICE);
        CASE(CUDA_ERROR_INVALID_CONTEXT);
        CASE(CUDA_ERROR_INVALID_IMAGE);
        CASE(CUDA_ERROR_NO_BINARY_FOR_GPU);
        CASE(CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
        CASE(CUDA_ERROR_INVALID_HANDLE);
        CASE(CUDA_ERROR_NOT_FOUND);
        CASE(CUDA_ERROR_ILLEGAL_ADDRESS);
        CASE(CUDA_ERROR_LAUNCH_FAILED);
        CASE(CUDA_ERROR_NOT_SUPPORTED);
        CASE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        CASE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        CASE(CUDA_ERROR_STREAM_CAPTURE_MERGE);
        CASE(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        CASE(CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        CASE(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        CASE(CUDA_ERROR_CAPTURED_EVENT);
        default: return nullptr;
    }
}

extern "C" CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = name_of(error);
    return *name != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// NVIDIA's sentences are its own.
extern "C" CUresult cuGetErrorString(CUresult error, const char **text) {
    const CUresult known = cuGetErrorName(error, text);
    if (known == CUDA_SUCCESS) {
        *text = "the stand-in for a driver";
    }
    return known;
}
