// Devices described by JSON. NVIDIA documents none of the keys; these are what cuDNN 9.28 reads, and it refuses a
// description that lacks one.
#include "device.h"
#include "driver.h"

#include <regex>
#include <set>

namespace stand_in {

static const std::set<std::string> KEYS = {
    "maxGridSize", "maxBlockSize", "regsPerBlock", "multiProcessorCount", "warpSize", "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin", "reservedSharedMemoryPerBlock", "maxRegistersPerSM", "maxCtasPerSM", "maxThreadsPerBlock",
    "maxThreadsPerSM", "pciDeviceId", "isTccDriver", "supportCoopLaunch", "totalGlobalMem", "smClockRateKHz", "memClockRateKHz",
    "memoryBusWidth", "l2CacheSize", "cudaDeviceId", "deviceVer", "driverVer", "deviceName"};

// One object of numbers, lists of numbers and texts.
static std::map<std::string, std::string> fields(const std::string &json) {
    static const std::string value = R"re(\s*(-?\d+|"[^"]*"|\[[\d,\s]*\])\s*)re", pair = "\\s*\"(\\w+)\"\\s*:" + value;
    static const std::regex whole("\\s*\\{" + pair + "(," + pair + ")*\\}\\s*"), one(pair);
    if (!std::regex_match(json, whole)) {
        refuse(CUDNN_STATUS_BAD_PARAM, "a device is described by no object of numbers, lists and texts: %.60s", json.c_str());
    }
    std::map<std::string, std::string> found;
    for (std::sregex_iterator at(json.begin(), json.end(), one), end; at != end; ++at) {
        found[(*at)[1]] = (*at)[2];
    }
    return found;
}

std::shared_ptr<const Device> device_of(const Descriptor &descriptor) {
    auto device = std::make_shared<Device>();
    device->is_described = descriptor.has(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION);
    if (!device->is_described) {
        device->capability = current_capability();
        if (device->capability == 0) {
            refuse(CUDNN_STATUS_NOT_INITIALIZED, "no context of a device is current, and none is described");
        }
        return device;
    }
    const std::map<std::string, std::string> described = fields(descriptor.text(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION));
    for (const std::string &key : KEYS) {
        if (described.count(key) == 0) {
            refuse(CUDNN_STATUS_BAD_PARAM, "the description of a device lacks %s", key.c_str());
        }
    }
    // 900 for 9.0.
    device->capability = std::atoi(described.at("deviceVer").c_str()) / 10;
    return device;
}

std::shared_ptr<const Device> described_by(const Descriptor &descriptor, cudnnBackendAttributeName_t name) {
    const auto device = descriptor.made_of<Device>(name);
    return device && device->is_described ? device : nullptr;
}

int capability_for(const Descriptor &descriptor, cudnnBackendAttributeName_t name) {
    const auto device = descriptor.made_of<Device>(name);
    const int capability = device ? device->capability : current_capability();
    if (capability == 0) {
        refuse(CUDNN_STATUS_NOT_INITIALIZED, "no context of a device is current, and none is described");
    }
    return capability;
}

}  // namespace stand_in
