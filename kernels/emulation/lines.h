// Lines of source of the program's own code.
#pragma once

#include <string>

namespace emulation {

// The line that called what returns to this address, as the debug information and `addr2line` say; where the machine has
// neither, the address.
std::string line_of(const void *return_address);

}  // namespace emulation
