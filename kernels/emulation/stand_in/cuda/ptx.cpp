// PTX line by line, as the compiler writes it.
#include "ptx.h"

#include <sstream>

namespace stand_in {

static bool starts_with(const std::string &line, const std::string &words) {
    return line.compare(0, words.size(), words) == 0;
}

// The text between a mark and an end.
static std::string between(const std::string &line, const std::string &mark, char end) {
    const size_t start = line.find(mark) + mark.size();
    return line.substr(start, line.find(end, start) - start);
}

static char letter_of(const std::string &type) {
    if (type == "u64" || type == "b64" || type == "s64") return 'l';
    if (type == "u32" || type == "b32" || type == "s32") return 'i';
    return type == "f32" ? 'f' : '?';
}

// `.shared .align 4 .b8 name[128];`
static size_t shared_bytes(const std::string &line) { return std::stoul(between(line, "[", ']')); }

// `.maxntid 128, 1, 1`
static unsigned threads_max(const std::string &line) {
    unsigned product = 1;
    char comma;
    std::istringstream numbers(line.substr(line.find(' ')));
    for (unsigned threads; numbers >> threads; numbers >> comma) {
        product *= threads;
    }
    return product;
}

static void read_line(Entry &entry, const std::string &line) {
    if (starts_with(line, ".param .")) {
        entry.parameters += letter_of(between(line, ".param .", ' '));
    } else if (starts_with(line, ".maxntid ")) {
        entry.threads_max = threads_max(line);
    } else if (starts_with(line, ".shared ")) {
        entry.static_bytes += shared_bytes(line);
    }
}

Ptx read_ptx(const std::string &text) {
    Ptx ptx;
    Entry *entry = nullptr;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        if (line == "}") {
            entry = nullptr;
            continue;
        }
        line.erase(0, line.find_first_not_of(" \t"));
        if (starts_with(line, ".target ")) {
            ptx.target = line.substr(8, line.find_first_of(", \r", 8) - 8);
        } else if (starts_with(line, ".visible .entry ")) {
            entry = &ptx.entries[between(line, ".entry ", '(')];
        } else if (entry != nullptr) {
            read_line(*entry, line);
        }
    }
    return ptx;
}

}  // namespace stand_in
