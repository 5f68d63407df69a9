// What the text of a PTX module declares.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace stand_in {

// A kernel as `.visible .entry` declares it.
struct Entry {
    // Types of the parameters, one letter each: l for 64 bits of integer or address, i for 32, f for a float.
    std::string parameters;
    // Most threads of a block.
    unsigned threads_max = 1024;
    // Shared memory that it declares itself.
    size_t static_bytes = 0;
};

struct Ptx {
    // As `.target` has it: sm_80, sm_90a.
    std::string target;
    std::map<std::string, Entry> entries;
};

// Reads a module. Without a target it was no PTX.
Ptx read_ptx(const std::string &text);

}  // namespace stand_in
