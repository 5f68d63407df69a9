// Reads machine code, in a format that NVIDIA does not document: as `cuobjdump` shows it and the compilers of CUDA 12
// and 13 write it. Also reads PTX as those write it. Anything else is refused.
#include "image.h"

#include <algorithm>
#include <cstring>
#include <elf.h>

namespace stand_in {

namespace {

// From 9.0 on, machine code counts what the device keeps of every block's shared memory.
const size_t RESERVED_BYTES = 1024;

// Attributes of a kernel in its section `.nv.info.`: a format, a name, and a value or its size.
struct Attribute {
    uint8_t format, name;
    uint16_t value;
};

const uint8_t HAS_SIZE = 4, MAX_THREADS = 0x05, PARAMETER = 0x17;

// The value of PARAMETER.
struct Parameter {
    uint32_t index;
    uint16_t ordinal, offset;
    uint32_t bits;

    unsigned bytes() const { return bits >> 18; }
};

template <typename T> T at(const char *place) {
    T value;
    std::memcpy(&value, place, sizeof(T));
    return value;
}

void read_attributes(Entry &entry, const char *place, const char *end) {
    std::map<unsigned, unsigned> parameters;
    while (place < end) {
        const Attribute attribute = at<Attribute>(place);
        place += sizeof(attribute);
        if (attribute.format != HAS_SIZE) {
            continue;
        }
        if (attribute.name == PARAMETER) {
            const Parameter parameter = at<Parameter>(place);
            parameters[parameter.ordinal] = parameter.bytes();
        } else if (attribute.name == MAX_THREADS) {
            entry.threads_max = at<uint32_t>(place) * at<uint32_t>(place + 4) * at<uint32_t>(place + 8);
        }
        place += attribute.value;
    }
    for (const auto &[ordinal, bytes] : parameters) {
        entry.parameters.push_back(bytes);
    }
}

// The text after a prefix; empty if it does not begin with that.
std::string after(const std::string &name, const std::string &prefix) {
    return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : "";
}

std::map<std::string, Entry> entries_of_machine_code(const char *code, size_t reserved_bytes) {
    const Elf64_Ehdr header = at<Elf64_Ehdr>(code);
    const auto section = [&](size_t index) { return at<Elf64_Shdr>(code + header.e_shoff + index * header.e_shentsize); };
    const char *names = code + section(header.e_shstrndx).sh_offset;
    std::map<std::string, Entry> entries;
    std::map<std::string, size_t> shared;
    for (size_t index = 0; index < header.e_shnum; index++) {
        const Elf64_Shdr found = section(index);
        const std::string name = names + found.sh_name;
        const char *start = code + found.sh_offset;
        if (const std::string kernel = after(name, ".nv.info."); !kernel.empty()) {
            read_attributes(entries[kernel], start, start + found.sh_size);
        } else if (const std::string kernel = after(name, ".nv.shared."); !kernel.empty()) {
            shared[kernel] = found.sh_size - std::min<size_t>(found.sh_size, reserved_bytes);
        }
    }
    for (auto &[name, entry] : entries) {
        entry.static_bytes = shared[name];
    }
    return entries;
}

std::optional<Image> read_machine_code(const char *code) {
    const Elf64_Ehdr header = at<Elf64_Ehdr>(code);
    if (header.e_machine != EM_CUDA) {
        return std::nullopt;
    }
    // ABI 8, Blackwell's and that of CUDA 13, has the compute capability a byte further up.
    const int capability = header.e_ident[EI_ABIVERSION] >= 8 ? header.e_flags >> 8 & 0xff : header.e_flags & 0xff;
    return Image{true, capability, 0, entries_of_machine_code(code, capability >= 90 ? RESERVED_BYTES : 0)};
}

// The text between two others, the first of which is searched from `start` on; empty if they are not found.
std::string between(const std::string &text, const std::string &first, const std::string &second, size_t start = 0) {
    const size_t found = text.find(first, start);
    if (found == std::string::npos) {
        return "";
    }
    const size_t from = found + first.size();
    return text.substr(from, text.find(second, from) - from);
}

// Bytes of each array of shared memory that PTX declares: `.shared .align 4 .b8 name[128];`. What a launch asks for has no
// size.
std::map<std::string, size_t> shared_arrays(const std::string &ptx) {
    const std::string start = ".shared .align ";
    std::map<std::string, size_t> arrays;
    for (size_t place = ptx.find(start); place != std::string::npos; place = ptx.find(start, place + 1)) {
        if (const std::string bytes = between(ptx, "[", "]", place); !bytes.empty()) {
            arrays[between(ptx, ".b8 ", "[", place)] = std::stoul(bytes);
        }
    }
    return arrays;
}

// A kernel from its name on: `name(` parameters `)`, directives, `{` code.
Entry entry_of_ptx(const std::string &kernel, const std::map<std::string, size_t> &shared) {
    Entry entry;
    const std::string parameters = between(kernel, "(", ")");
    for (size_t place = parameters.find(".param ."); place != std::string::npos;
         place = parameters.find(".param .", place + 1)) {
        // `.param .u64`: the type's name ends in its bits.
        entry.parameters.push_back(unsigned(std::stoul(parameters.substr(place + std::strlen(".param .u")))) / 8);
    }
    if (const std::string threads = between(kernel.substr(0, kernel.find('{')), ".maxntid ", ","); !threads.empty()) {
        entry.threads_max = unsigned(std::stoul(threads));
    }
    for (const auto &[name, bytes] : shared) {
        entry.static_bytes += kernel.find(name) == std::string::npos ? 0 : bytes;
    }
    return entry;
}

std::optional<Image> read_ptx(const std::string &ptx) {
    const std::string version = between(ptx, "\n.version ", "\n"), target = between(ptx, "\n.target sm_", "\n");
    const size_t point = version.find('.');
    if (point == std::string::npos || target.empty()) {
        return std::nullopt;
    }
    Image image = {false, std::stoi(target), 10 * std::stoi(version) + std::stoi(version.substr(point + 1)), {}};
    const std::map<std::string, size_t> shared = shared_arrays(ptx);
    const std::string start = ".visible .entry ";
    for (size_t place = ptx.find(start); place != std::string::npos;) {
        const size_t next = ptx.find(start, place + 1);
        const std::string kernel = ptx.substr(place + start.size(), next - place);
        image.entries[kernel.substr(0, kernel.find('('))] = entry_of_ptx(kernel, shared);
        place = next;
    }
    return image;
}

}  // namespace

std::optional<Image> read_image(const void *image) {
    const char *start = static_cast<const char *>(image);
    return std::memcmp(start, ELFMAG, SELFMAG) == 0 ? read_machine_code(start) : read_ptx(start);
}

}  // namespace stand_in
