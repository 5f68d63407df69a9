// Devices that plans are made for: described, or present.
#pragma once

#include "descriptor.h"

namespace stand_in {

struct Device : Made {
    // Compute capability without the point: 90.
    int capability;
    // Whether it is only described.
    bool is_described;
};

std::shared_ptr<const Device> device_of(const Descriptor &descriptor);

// The device that an attribute describes; null where it describes none.
std::shared_ptr<const Device> described_by(const Descriptor &descriptor, cudnnBackendAttributeName_t name);

// That of the device that an attribute describes, or of the current context's.
int capability_for(const Descriptor &descriptor, cudnnBackendAttributeName_t name);

}  // namespace stand_in
