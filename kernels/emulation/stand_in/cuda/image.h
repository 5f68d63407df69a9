// What a fat binary holds: machine code for some GPUs, and PTX for later ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace stand_in {

// A kernel as machine code describes it.
struct Entry {
    // Bytes of each parameter.
    std::vector<unsigned> parameters;
    // Most threads of a block.
    unsigned threads_max = 1024;
    // Shared memory that it declares itself.
    size_t static_bytes = 0;
};

struct Image {
    // Machine code, or else PTX.
    bool is_machine_code;
    // Compute capability: 80 for 8.0.
    int capability;
    // Of machine code alone: PTX is compressed.
    std::map<std::string, Entry> entries;
};

// The images of a fat binary; none if it is something else, or one of them cannot be read.
std::vector<Image> read_images(const void *binary);

}  // namespace stand_in
