// Calls `addr2line`, which comes with compilers. It is slow, so it is called only for errors.
#include "lines.h"

#include <cstdint>
#include <cstdio>
#include <link.h>
#include <map>
#include <unistd.h>

namespace emulation {

// The program or library that an address lies in, and where there.
struct Position {
    uintptr_t address;
    std::string file;
    uintptr_t offset;
};

static int find(dl_phdr_info *info, size_t, void *data) {
    Position &position = *static_cast<Position *>(data);
    for (unsigned part = 0; part < info->dlpi_phnum; part++) {
        const auto &header = info->dlpi_phdr[part];
        const uintptr_t start = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD && position.address - start < header.p_memsz) {
            position.file = info->dlpi_name[0] != 0 ? info->dlpi_name : "/proc/" + std::to_string(getpid()) + "/exe";
            position.offset = position.address - info->dlpi_addr;
            return 1;
        }
    }
    return 0;
}

// Of inlined functions every line is given, from the innermost to the kernel's own; empty if there is none.
static std::string lines_at(const Position &position) {
    char command[4096], line[4096];
    std::snprintf(command, sizeof(command), "addr2line -i -e '%s' %#zx 2>/dev/null", position.file.c_str(),
                  position.offset);
    std::string lines;
    FILE *const output = popen(command, "r");
    while (output != nullptr && std::fgets(line, sizeof(line), output) != nullptr) {
        std::string name = line;
        name = name.substr(name.find_last_of('/') + 1);
        name = name.substr(0, name.find_first_of(" \n"));
        if (name.find('?') == std::string::npos) {
            lines += (lines.empty() ? "" : " in ") + name;
        }
    }
    if (output != nullptr) {
        pclose(output);
    }
    return lines;
}

std::string line_of(const void *return_address) {
    static thread_local std::map<const void *, std::string> known;
    std::string &line = known[return_address];
    if (line.empty()) {
        // The call ends where its caller goes on.
        Position position = {reinterpret_cast<uintptr_t>(return_address) - 1, "", 0};
        dl_iterate_phdr(find, &position);
        char address[32];
        std::snprintf(address, sizeof(address), "%p", return_address);
        line = lines_at(position);
        line = line.empty() ? address : line;
    }
    return line;
}

}  // namespace emulation
