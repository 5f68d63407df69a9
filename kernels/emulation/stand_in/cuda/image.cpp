// Fat binaries, and the machine code in them, by formats that NVIDIA does not document: as `cuobjdump` shows them, and
// as the compilers of CUDA 12 and 13 write them. What looks otherwise is not read.
#include "image.h"

#include <algorithm>
#include <cstring>
#include <elf.h>

namespace stand_in {

namespace {

const uint32_t FAT_BINARY = 0xba55ed50;
const uint16_t PTX = 1, MACHINE_CODE = 2;

// What stands before all images.
struct BinaryHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

// What stands before each.
struct ImageHeader {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, options;
    uint16_t minor, major;
    uint32_t capability;
};

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

// What follows a prefix; empty where it does not begin so.
std::string after(const std::string &name, const std::string &prefix) {
    return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : "";
}

std::map<std::string, Entry> read_entries(const char *code) {
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
            shared[kernel] = found.sh_size;
        }
    }
    for (auto &[name, entry] : entries) {
        entry.static_bytes = shared[name];
    }
    return entries;
}

}  // namespace

std::vector<Image> read_images(const void *binary) {
    const char *place = static_cast<const char *>(binary);
    const BinaryHeader header = at<BinaryHeader>(place);
    if (header.magic != FAT_BINARY) {
        return {};
    }
    place += header.header_bytes;
    const char *end = place + header.bytes;
    std::vector<Image> images;
    while (place < end) {
        const ImageHeader image = at<ImageHeader>(place);
        const char *code = place + image.header_bytes;
        const bool is_machine_code = image.kind == MACHINE_CODE;
        if (is_machine_code ? std::memcmp(code, ELFMAG, SELFMAG) != 0 : image.kind != PTX) {
            return {};
        }
        images.push_back({is_machine_code, int(image.capability), {}});
        if (is_machine_code) {
            images.back().entries = read_entries(code);
        }
        place = code + image.bytes;
    }
    return images;
}

}  // namespace stand_in
