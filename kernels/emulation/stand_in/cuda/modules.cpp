// Modules, their functions, and launches: the text must declare a kernel as the emulation has it, and the emulation
// runs it.
#include "../../launch.h"
#include "memory.h"
#include "ptx.h"

#include <algorithm>
#include <cstring>
#include <memory>

struct CUfunc_st {
    std::string name;
    stand_in::Entry entry;
    const emulation::Kernel *kernel;
    size_t dynamic_bytes_max;
};

struct CUmod_st {
    stand_in::Ptx ptx;
    std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
};

namespace stand_in {

// Whether PTX for a target runs here: sm_80 on 8.0 and everything newer, sm_90a on 9.0 alone.
static bool is_for_this_device(const std::string &target) {
    const int wanted = std::atoi(target.c_str() + target.find('_') + 1);
    return std::isalpha(target.back()) ? wanted == capability() : wanted <= capability();
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

// The parameters of an emulated kernel as PTX has them: pointers and sizes are numbers of 64 bits.
static std::string in_ptx(std::string parameters) {
    std::replace(parameters.begin(), parameters.end(), 'p', 'l');
    std::replace(parameters.begin(), parameters.end(), 's', 'l');
    return parameters;
}

// Every pointer is null or leads into device memory.
static bool pointers_are_sound(const CUfunc_st &function, void **arguments) {
    const std::string &letters = function.kernel->parameters;
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

}  // namespace stand_in

using namespace stand_in;

extern "C" CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                                       void **values) {
    STAND_IN_ENTER(ready("cuModuleLoadDataEx"));
    Ptx ptx = read_ptx(static_cast<const char *>(image));
    if (ptx.target.empty() || ptx.entries.empty()) {
        write_log("no PTX: no target, or no entry", count, options, values);
        return CUDA_ERROR_INVALID_PTX;
    }
    if (!is_for_this_device(ptx.target)) {
        write_log("PTX for " + ptx.target, count, options, values);
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    *module = new CUmod_st{std::move(ptx), {}};
    alive<CUmod_st>().insert(*module);
    return CUDA_SUCCESS;
}

extern "C" CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}

extern "C" CUresult cuModuleUnload(CUmodule module) {
    STAND_IN_ENTER(ready("cuModuleUnload", module));
    for (const auto &[name, function] : module->functions) {
        alive<CUfunc_st>().erase(function.get());
    }
    alive<CUmod_st>().erase(module);
    delete module;
    return CUDA_SUCCESS;
}

extern "C" CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    STAND_IN_ENTER(ready("cuModuleGetFunction", module));
    const auto entry = module->ptx.entries.find(name);
    const emulation::Kernel *kernel = emulation::kernel_of(name);
    if (entry == module->ptx.entries.end() || kernel == nullptr) {
        say("cuModuleGetFunction", "%s has no entry `%s`", kernel == nullptr ? "the emulation" : "the module", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    if (entry->second.parameters != in_ptx(kernel->parameters)) {
        say("cuModuleGetFunction", "`%s` takes `%s` in PTX and `%s` in the emulation", name,
            entry->second.parameters.c_str(), kernel->parameters.c_str());
        return CUDA_ERROR_NOT_FOUND;
    }
    std::unique_ptr<CUfunc_st> &found = module->functions[name];
    if (found == nullptr) {
        const size_t dynamic_bytes_max = SHARED_BYTES - entry->second.static_bytes;
        found.reset(new CUfunc_st{name, entry->second, kernel, dynamic_bytes_max});
        alive<CUfunc_st>().insert(found.get());
    }
    *function = found.get();
    return CUDA_SUCCESS;
}

extern "C" CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    STAND_IN_ENTER(ready("cuFuncGetAttribute", function));
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = int(function->entry.threads_max); break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = int(function->entry.static_bytes); break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = int(function->dynamic_bytes_max); break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

extern "C" CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    STAND_IN_ENTER(ready("cuFuncSetAttribute", function));
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
    const std::string error =
        is_idle() ? "" : emulation::run(*function->kernel, grid, block, shared_bytes, arguments);
    if (!error.empty()) {
        say(function->name.c_str(), "%s", error.c_str());
        return CUDA_ERROR_LAUNCH_FAILED;
    }
    return CUDA_SUCCESS;
}
