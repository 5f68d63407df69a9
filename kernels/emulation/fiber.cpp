// A context starts a fiber, but jumps switch between fibers, since switching contexts makes a system call for the
// signal mask every time. The compiler's built-in jumps save three registers; the function that is jumped into restores
// the others.
#include "fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulation {

static const size_t STACK_BYTES = 128 << 10;
static const size_t GUARD_BYTES = 64 << 10;

// Most stacks are never touched, and take only address space.
Stacks::Stacks(size_t count) : bytes(count * (GUARD_BYTES + STACK_BYTES)) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapped == MAP_FAILED) {
        std::perror("emulation: no memory for stacks");
        std::abort();
    }
    first = static_cast<char *>(mapped);
}

Stacks::~Stacks() { munmap(first, bytes); }

// Stacks differ in length: their ends, which is what threads use, would otherwise compete for the same lines of the
// processor's caches.
Stacks::Stack Stacks::stack(size_t index) {
    char *const guard = first + index * (GUARD_BYTES + STACK_BYTES);
    if (mprotect(guard, GUARD_BYTES, PROT_NONE) != 0) {
        std::perror("emulation: no guard for a stack");
        std::abort();
    }
    const size_t left_out = index * 5 * 64 % (16 << 10);
    return {guard + GUARD_BYTES, STACK_BYTES - left_out};
}

// `makecontext` hands over ints.
void Fiber::start(unsigned upper, unsigned lower) {
    const uintptr_t address = uintptr_t(upper) << 32 | lower;
    Fiber *fiber = reinterpret_cast<Fiber *>(address);
    fiber->body();
    std::abort();
}

void Fiber::begin() {
    started = true;
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = stack.start;
    first.uc_stack.ss_size = stack.bytes;
    first.uc_link = nullptr;
    const uintptr_t address = reinterpret_cast<uintptr_t>(this);
    makecontext(&first, reinterpret_cast<void (*)()>(&Fiber::start), 2, unsigned(address >> 32), unsigned(address));
    setcontext(&first);
}

// The built-in requires that the jump is in another function than its target.
[[noreturn]] __attribute__((noinline)) static void jump(void **to) { __builtin_longjmp(to, 1); }

// Where the caller of `resume` continues; each host thread has one at a time.
static __thread void *caller[5];

void Fiber::go_on() {
    if (started) {
        jump(own);
    }
    begin();
}

void Fiber::resume() {
    if (__builtin_setjmp(caller) == 0) {
        go_on();
    }
}

void Fiber::suspend() {
    if (__builtin_setjmp(own) == 0) {
        jump(caller);
    }
}

void Fiber::hand_over(Fiber &other) {
    if (__builtin_setjmp(own) == 0) {
        other.go_on();
    }
}

}  // namespace emulation
