// NVML: a GPU's clocks, and the processes on it, as a test sets them. It is the GPU of the driver's stand-in; if that
// is loaded, its memory is asked for.
#include "../settings.h"
#include "nvml_api.h"

#include <algorithm>
#include <dlfcn.h>
#include <optional>
#include <sstream>
#include <unistd.h>
#include <vector>

using stand_in::number_setting;

// A device as it was looked up.
struct nvmlDevice_st {
    unsigned bus, sm_clock_mhz;
};

namespace {

const unsigned SM_CLOCK_MAX_MHZ = 1980, MEMORY_CLOCK_MHZ = 2619, POWER_MW = 650000, POWER_LIMIT_MW = 700000;

// The other process, which holds what STAND_IN_OTHERS_BYTES says, less STAND_IN_UNOWNED_BYTES.
const unsigned OTHER_PID = 4000000;
const char OTHER_NAME[] = "another-trainer";

// The next of STAND_IN_SM_CLOCKS each time that a device is looked up, and the last from then on.
unsigned next_sm_clock_mhz() {
    static size_t looked_up = 0;
    std::stringstream clocks(stand_in::setting("STAND_IN_SM_CLOCKS", "1980"));
    std::string clock, one;
    for (size_t index = 0; index <= looked_up && std::getline(clocks, one, ','); index++) {
        clock = one;
    }
    looked_up++;
    return unsigned(std::strtoul(clock.c_str(), nullptr, 10));
}

// What this process holds of the GPU of its current context: nothing here until it allocates. None where it has none.
std::optional<uint64_t> own_bytes() {
    void *driver = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (driver == nullptr) {
        return std::nullopt;
    }
    const auto get_current = reinterpret_cast<int (*)(void **)>(dlsym(driver, "cuCtxGetCurrent"));
    const auto get_info = reinterpret_cast<int (*)(size_t *, size_t *)>(dlsym(driver, "cuMemGetInfo_v2"));
    void *context = nullptr;
    size_t free = 0, total = 0;
    const bool known = get_current(&context) == 0 && context != nullptr && get_info(&free, &total) == 0;
    if (!known) {
        return std::nullopt;
    }
    return total - free - number_setting("STAND_IN_OTHERS_BYTES", 0);
}

}  // namespace

extern "C" nvmlReturn_t nvmlInit_v2() {
    return number_setting("STAND_IN_NVML", 1) != 0 ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

extern "C" nvmlReturn_t nvmlShutdown() { return NVML_SUCCESS; }

// Handles live as long as the library.
extern "C" nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    unsigned domain = 0, bus = 0;
    if (std::sscanf(bus_id, "%x:%x:", &domain, &bus) != 2 || domain != 0 || bus == 0
        || bus > number_setting("STAND_IN_DEVICES", 1)) {
        return NVML_ERROR_NOT_FOUND;
    }
    *device = new nvmlDevice_st{bus, next_sm_clock_mhz()};
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) {
    *mhz = type == NVML_CLOCK_SM ? device->sm_clock_mhz : MEMORY_CLOCK_MHZ;
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t, nvmlClockType_t type, unsigned int *mhz) {
    *mhz = type == NVML_CLOCK_SM ? SM_CLOCK_MAX_MHZ : MEMORY_CLOCK_MHZ;
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t, unsigned int *milliwatts) {
    *milliwatts = POWER_MW;
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t, unsigned int *milliwatts) {
    *milliwatts = POWER_LIMIT_MW;
    return NVML_SUCCESS;
}

// Tells one GPU from another.
extern "C" nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t, unsigned int *celsius) {
    *celsius = 60 + device->bus;
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t, unsigned long long *reasons) {
    *reasons = number_setting("STAND_IN_THROTTLE", 0);
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof(nvmlMemory_v2_t) | 2 << 24)) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    memory->total = number_setting("STAND_IN_TOTAL_BYTES", uint64_t(80) << 30);
    memory->reserved = 0;
    memory->used = number_setting("STAND_IN_OTHERS_BYTES", 0) + own_bytes().value_or(0);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

// If the caller's array is too small, returns how much is needed.
extern "C" nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned int *count,
                                                                nvmlProcessInfo_t *infos) {
    const uint64_t of_others = number_setting("STAND_IN_OTHERS_BYTES", 0) - number_setting("STAND_IN_UNOWNED_BYTES", 0);
    std::vector<nvmlProcessInfo_t> processes;
    if (of_others > 0) {
        processes.push_back({OTHER_PID, of_others, ~0u, ~0u});
    }
    if (const auto own = own_bytes()) {
        processes.push_back({unsigned(getpid()), *own, ~0u, ~0u});
    }
    const unsigned room = *count;
    *count = unsigned(processes.size());
    if (room < processes.size()) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    std::copy(processes.begin(), processes.end(), infos);
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned int *count,
                                                                 nvmlProcessInfo_t *) {
    *count = 0;
    return NVML_SUCCESS;
}

extern "C" nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    if (pid != OTHER_PID) {
        return NVML_ERROR_NOT_FOUND;
    }
    std::snprintf(name, length, "%s", OTHER_NAME);
    return NVML_SUCCESS;
}
