// What a module is made from: machine code for some GPUs, or PTX for later ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace stand_in {

// A kernel as its code describes it.
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
    // Of PTX alone: 88 for 8.8.
    int ptx_version;
    std::map<std::string, Entry> entries;
};

// What begins there: an ELF file, or a text that ends in a zero; none if it is something else.
std::optional<Image> read_image(const void *image);

}  // namespace stand_in
