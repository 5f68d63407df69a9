// A context starts a fiber; jumps switch, since switching contexts asks the system for the signal mask every time.
#include "fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

namespace emulation {

static const size_t STACK_BYTES = 128 << 10;
// Below the stack, so that an overflow is a fault and not another fiber's trouble.
static const size_t GUARD_BYTES = 64 << 10;

Fiber::Fiber(std::function<void()> body) : body(std::move(body)) {
    stack = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, GUARD_BYTES, PROT_NONE) != 0) {
        std::perror("emulation: no memory for a stack");
        std::abort();
    }
}

Fiber::~Fiber() { munmap(stack, GUARD_BYTES + STACK_BYTES); }

// `makecontext` hands over ints.
void Fiber::start(unsigned upper, unsigned lower) {
    const uintptr_t address = uintptr_t(upper) << 32 | lower;
    Fiber *fiber = reinterpret_cast<Fiber *>(address);
    fiber->body();
    std::abort();
}

void Fiber::resume() {
    if (_setjmp(caller) != 0) {
        return;
    }
    if (started) {
        _longjmp(own, 1);
    }
    started = true;
    getcontext(&first);
    first.uc_stack.ss_sp = static_cast<char *>(stack) + GUARD_BYTES;
    first.uc_stack.ss_size = STACK_BYTES;
    first.uc_link = nullptr;
    const uintptr_t address = reinterpret_cast<uintptr_t>(this);
    makecontext(&first, reinterpret_cast<void (*)()>(&Fiber::start), 2, unsigned(address >> 32), unsigned(address));
    setcontext(&first);
}

void Fiber::suspend() {
    if (_setjmp(own) == 0) {
        _longjmp(caller, 1);
    }
}

}  // namespace emulation
