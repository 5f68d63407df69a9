// Modules, their functions, and launches: the code must describe a kernel as the emulation has it, and the
// emulation runs it.
#include "../../launch.h"
#include "graphs.h"
#include "image.h"
#include "memory.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>

struct CUfunc_st {
    std::string name;
    stand_in::Entry entry;
    const emulation::Kernel *kernel;
    size_t dynamic_bytes_max;
    // The share of a multiprocessor's memory for shared memory, in percent; -1 leaves it to the driver.
    int carveout;
};

struct CUmod_st {
    // Device memory that it holds.
    uint64_t bytes;
    std::map<std::string, stand_in::Entry> entries;
    std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

namespace stand_in {

// Registers of a multiprocessor.
constexpr unsigned REGISTERS = 65536;

// The first version of CUDA that knows a GPU (release notes of CUDA 12.8, 12.9 and 13.0).
static int first_driver(int capability) {
    switch (capability) {
        case 103: case 121: return 12090;
        case 110: return 13000;
        default: return capability >= 100 ? 12080 : 11080;
    }
}

// The newest PTX that the driver compiles: 88 for 8.8 (PTX ISA, release history).
static int newest_ptx() {
    const std::pair<int, int> history[] = {{13000, 90}, {12090, 88}, {12080, 87}, {12070, 86}, {12050, 85},
                                           {12040, 84}, {12030, 83}, {12020, 82}, {12010, 81}, {12000, 80}};
    const auto is_known = [](const std::pair<int, int> &release) { return release.first <= driver_version(); };
    const auto newest = std::find_if(std::begin(history), std::end(history), is_known);
    return newest == std::end(history) ? 78 : newest->second;
}

// Machine code runs on later minor versions of its compute capability, PTX on everything later; a driver takes code for
// chips that it knows, and PTX that is no newer than itself.
static CUresult fits(const Image &image) {
    const bool is_of_this_kind = !image.is_machine_code || image.capability / 10 == capability() / 10;
    if (!is_of_this_kind || image.capability > capability() || first_driver(image.capability) > driver_version()) {
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    return image.ptx_version <= newest_ptx() ? CUDA_SUCCESS : CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
}

// Adds a line to the file that STAND_IN_IMAGES names.
static void note(const Image &image) {
    const std::string path = setting("STAND_IN_IMAGES", "");
    if (!path.empty()) {
        std::ofstream(path, std::ios::app) << (image.is_machine_code ? "sm_" : "compute_") << image.capability << '\n';
    }
}

static void write_log(const std::string &text, unsigned count, CUjit_option *options, void **values) {
    char *log = nullptr;
    size_t bytes = 0;
    for (unsigned option = 0; option < count; option++) {
        if (options[option] == CU_JIT_ERROR_LOG_BUFFER) {
            log = static_cast<char *>(values[option]);
        } else if (options[option] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) {
            bytes = reinterpret_cast<size_t>(values[option]);
        }
    }
    if (log != nullptr && bytes != 0) {
        std::snprintf(log, bytes, "%s", text.c_str());
    }
}

// The parameters of an emulated kernel as machine code has them: pointers and sizes have 8 bytes.
static std::vector<unsigned> sizes(const std::string &parameters) {
    std::vector<unsigned> sizes;
    for (const char letter : parameters) {
        sizes.push_back(letter == 'p' || letter == 's' ? 8 : 4);
    }
    return sizes;
}

// Every pointer is null or leads into device memory.
static bool pointers_are_sound(const CUfunc_st &function, void **arguments) {
    const std::string letters = function.kernel->parameters;
    for (size_t index = 0; index < letters.size(); index++) {
        const void *pointer = letters[index] == 'p' ? *static_cast<void **>(arguments[index]) : nullptr;
        if (pointer != nullptr && !is_device_memory(pointer, 1)) {
            say(function.name.c_str(), "argument %zu is %p, which is not in device memory", index, pointer);
            return false;
        }
    }
    return true;
}

// What a device would refuse; empty if nothing.
static std::string refusal(const CUfunc_st &function, uint3 grid, uint3 block, size_t shared_bytes) {
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    if (threads > function.entry.threads_max) {
        return std::to_string(threads) + " threads, compiled for " + std::to_string(function.entry.threads_max);
    }
    if (shared_bytes > function.dynamic_bytes_max) {
        return std::to_string(shared_bytes) + " bytes of shared memory, of which " +
               std::to_string(function.dynamic_bytes_max) + " are allowed";
    }
    // How memory is divided decides how many blocks a multiprocessor has.
    if (shared_bytes > 0 && function.carveout != 100) {
        return std::to_string(shared_bytes) + " bytes of shared memory, with a carve-out of " + std::to_string(function.carveout);
    }
    return emulation::refusal(grid, block, shared_bytes);
}

static CUresult check_launch(CUfunction function, uint3 grid, uint3 block, size_t shared_bytes, CUstream stream,
                             void **arguments) {
    STAND_IN_ENTER(ready_on("cuLaunchKernel", stream));
    STAND_IN_CHECK(ready("cuLaunchKernel", function));
    const std::string refused = refusal(*function, grid, block, shared_bytes);
    if (!refused.empty()) {
        say(function->name.c_str(), "%s", refused.c_str());
        return CUDA_ERROR_INVALID_VALUE;
    }
    return pointers_are_sound(*function, arguments) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

// What STAND_IN_SM90 says that kernels for 9.0 alone do, those with names that begin with STAND_IN_SM90_OF: their first argument is the
// result, of which the first bytes change.
static CUresult misbehave(const CUfunc_st &function, void **arguments) {
    static const std::string says = setting("STAND_IN_SM90", ""), whose = setting("STAND_IN_SM90_OF", "");
    const bool is_meant = function.name.find("_sm90") != std::string::npos && function.name.rfind(whose, 0) == 0;
    if (says.empty() || !is_meant) {
        return CUDA_SUCCESS;
    }
    if (says == "faults") {
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    if (says == "hangs") {
        stand_in_hold(1);
        return CUDA_SUCCESS;
    }
    static uint64_t launches = 0;
    uint8_t *result = *static_cast<uint8_t **>(arguments[0]);
    // Bits of the exponent, or the last of the significand, which every other launch changes.
    result[says == "wrong" ? 3 : 0] ^= says == "wrong" ? 0x10 : uint8_t(launches++ % 2);
    return CUDA_SUCCESS;
}

static CUresult run(const CUfunc_st &function, uint3 grid, uint3 block, size_t shared_bytes, void **arguments) {
    const std::string error =
        is_idle() ? "" : emulation::run(*function.kernel, grid, block, shared_bytes, arguments);
    if (!error.empty()) {
        say(function.name.c_str(), "%s", error.c_str());
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    return misbehave(function, arguments);
}

// The values of a kernel's arguments at the time of the call: a graph keeps them.
struct Values {
    std::vector<uint64_t> values;

    Values(const CUfunc_st &function, void **arguments) {
        for (const unsigned bytes : function.entry.parameters) {
            values.push_back(0);
            std::memcpy(&values.back(), arguments[values.size() - 1], bytes);
        }
    }
    std::vector<void *> addresses() {
        std::vector<void *> addresses;
        for (uint64_t &value : values) {
            addresses.push_back(&value);
        }
        return addresses;
    }
};

}  // namespace stand_in

using namespace stand_in;

extern "C" CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                                       void **values) {
    STAND_IN_ENTER(ready("cuModuleLoadDataEx"));
    STAND_IN_CHECK(not_captured("cuModuleLoadDataEx"));
    const std::optional<Image> read = read_image(image);
    if (!read.has_value() || reinterpret_cast<uintptr_t>(image) % 8 != 0) {
        write_log("neither machine code nor PTX that can be read, or not aligned", count, options, values);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    if (const CUresult refused = fits(*read)) {
        write_log("not for this device and this driver", count, options, values);
        return refused;
    }
    const uint64_t bytes = number_setting("STAND_IN_MODULE_BYTES", 0);
    STAND_IN_CHECK(take_memory(bytes));
    note(*read);
    *module = new CUmod_st{bytes, read->entries, {}};
    alive<CUmod_st>().insert(*module);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}

extern "C" CUresult cuModuleUnload(CUmodule module) {
    wait_while_held();
    STAND_IN_ENTER(ready("cuModuleUnload", module));
    STAND_IN_CHECK(catch_up_all());
    for (const auto &[name, function] : module->functions) {
        alive<CUfunc_st>().erase(function.get());
    }
    alive<CUmod_st>().erase(module);
    give_back_memory(module->bytes);
    delete module;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    STAND_IN_ENTER(ready("cuModuleGetFunction", module));
    const auto entry = module->entries.find(name);
    const emulation::Kernel *kernel = emulation::kernel_of(name);
    if (entry == module->entries.end() || kernel == nullptr) {
        say("cuModuleGetFunction", "%s has no entry `%s`", kernel == nullptr ? "the emulation" : "the module", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    if (entry->second.parameters != sizes(kernel->parameters)) {
        say("cuModuleGetFunction", "`%s` takes %zu parameters in the module and `%s` in the emulation, or of other sizes",
            name, entry->second.parameters.size(), kernel->parameters);
        return CUDA_ERROR_NOT_FOUND;
    }
    std::unique_ptr<CUfunc_st> &found = module->functions[name];
    if (found == nullptr) {
        const size_t dynamic_bytes_max = SHARED_BYTES - entry->second.static_bytes;
        found.reset(new CUfunc_st{name, entry->second, kernel, dynamic_bytes_max, -1});
        alive<CUfunc_st>().insert(found.get());
    }
    *function = found.get();
    return CUDA_SUCCESS;
}

// Local memory of a thread that a kernel takes.
static size_t local_bytes() { return number_setting("STAND_IN_LOCAL_BYTES", 0); }

// The device has local memory for all threads that it runs at a time: more, once a kernel has more, or the limit is raised.
static CUresult hold_local(size_t bytes) {
    constexpr size_t THREADS = 132 * 2048;
    static size_t held = 0;
    if (bytes > held) {
        STAND_IN_CHECK(take_memory((bytes - held) * THREADS));
        held = bytes;
    }
    return CUDA_SUCCESS;
}

extern "C" CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    STAND_IN_ENTER(ready("cuCtxGetLimit"));
    *value = 1024;
    return limit == CU_LIMIT_STACK_SIZE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

extern "C" CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    STAND_IN_ENTER(ready("cuCtxSetLimit"));
    STAND_IN_CHECK(not_captured("cuCtxSetLimit"));
    return limit == CU_LIMIT_STACK_SIZE ? hold_local(value) : CUDA_ERROR_INVALID_VALUE;
}

extern "C" CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    STAND_IN_ENTER(ready("cuFuncGetAttribute", function));
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = int(function->entry.threads_max); break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = int(function->entry.static_bytes); break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = int(function->dynamic_bytes_max); break;
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = int(local_bytes()); break;
        // As many as leave room for its largest block.
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = std::min(255, int(REGISTERS / function->entry.threads_max)); break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

// By threads and shared memory alone, of a multiprocessor that has as much as two of the largest blocks.
extern "C" CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                                size_t dynamic_bytes) {
    STAND_IN_ENTER(ready("cuOccupancyMaxActiveBlocksPerMultiprocessor", function));
    if (threads <= 0 || unsigned(threads) > function->entry.threads_max || dynamic_bytes > function->dynamic_bytes_max) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const size_t shared = std::max<size_t>(1, function->entry.static_bytes + dynamic_bytes);
    *blocks = int(std::min<size_t>({32, 2048 / size_t(threads), 2 * shared_bytes_max() / shared}));
    return CUDA_SUCCESS;
}

extern "C" CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    STAND_IN_ENTER(ready("cuFuncSetAttribute", function));
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
        function->carveout = value;
        return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    const size_t most = shared_bytes_max() - function->entry.static_bytes;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || size_t(value) > most) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    function->dynamic_bytes_max = size_t(value);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                   unsigned int shared_bytes, CUstream stream, void **arguments, void **extra) {
    const uint3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
    STAND_IN_CHECK(extra == nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    STAND_IN_CHECK(check_launch(function, grid, block, shared_bytes, stream, arguments));
    STAND_IN_CHECK(hold_local(local_bytes()));
    if (holds_launch()) {
        return CUDA_SUCCESS;
    }
    const auto later = [=, values = Values(*function, arguments)]() mutable {
        std::vector<void *> kept = values.addresses();
        STAND_IN_CHECK(check_launch(function, grid, block, shared_bytes, stream, kept.data()));
        return stand_in::run(*function, grid, block, shared_bytes, kept.data());
    };
    return captures(stream, later) ? CUDA_SUCCESS : stand_in::run(*function, grid, block, shared_bytes, arguments);
}
