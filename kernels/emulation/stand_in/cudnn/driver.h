// What the library asks the stand-in for the driver, which the program has loaded.
#pragma once

#include "backend_api.h"

#include <functional>

namespace stand_in {

// Compute capability of the current context's device, 90 for 9.0; 0 where there is no driver or no context.
int current_capability();

// Whether so many bytes lie in a live block of the device, and the stream exists. False where there is no driver.
bool is_on_device(const void *memory, size_t bytes, cudaStream_t stream);

// Whether an address lies in memory of the device.
bool is_device_memory(const void *memory);

// Takes the memory of the device that a plan's code needs, as much as a product's. Whether there was room.
bool take_code_memory();

// Whether a stream captures: then `work` runs whenever the graph is launched.
bool captures(cudaStream_t stream, std::function<void()> work);

}  // namespace stand_in
