/* A driver without a device, for cuDNN while it makes plans for devices that are described to it: it looks for these functions
   when it is loaded, and asks three of them. */
#include <stddef.h>

enum { SUCCESS = 0, NO_DEVICE = 100, CUDA_VERSION = 13000 };

#define WITHOUT_DEVICE(name) \
    int name(void) { return NO_DEVICE; }

int cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = 0;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == SUCCESS ? "no error" : "no CUDA-capable device is detected";
    return SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
    *text = error == SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_NO_DEVICE";
    return SUCCESS;
}

WITHOUT_DEVICE(cuCtxGetCurrent)
WITHOUT_DEVICE(cuCtxGetLimit)
WITHOUT_DEVICE(cuCtxPopCurrent)
WITHOUT_DEVICE(cuCtxPushCurrent)
WITHOUT_DEVICE(cuDeviceGet)
WITHOUT_DEVICE(cuKernelGetAttribute)
WITHOUT_DEVICE(cuKernelGetFunction)
WITHOUT_DEVICE(cuKernelSetAttribute)
WITHOUT_DEVICE(cuLaunchCooperativeKernel)
WITHOUT_DEVICE(cuLaunchKernel)
WITHOUT_DEVICE(cuLaunchKernelEx)
WITHOUT_DEVICE(cuLibraryGetKernel)
WITHOUT_DEVICE(cuLibraryLoadData)
WITHOUT_DEVICE(cuLibraryLoadFromFile)
WITHOUT_DEVICE(cuLibraryUnload)
WITHOUT_DEVICE(cuLinkAddData)
WITHOUT_DEVICE(cuLinkComplete)
WITHOUT_DEVICE(cuLinkCreate)
WITHOUT_DEVICE(cuLinkDestroy)
WITHOUT_DEVICE(cuModuleGetFunction)
WITHOUT_DEVICE(cuModuleLoadData)
WITHOUT_DEVICE(cuModuleUnload)
WITHOUT_DEVICE(cuOccupancyMaxPotentialClusterSize)
WITHOUT_DEVICE(cuStreamGetCtx)
WITHOUT_DEVICE(cuTensorMapEncodeIm2col)
WITHOUT_DEVICE(cuTensorMapEncodeTiled)
