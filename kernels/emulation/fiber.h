// Stacks that take turns on one thread of the host.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>
#include <ucontext.h>

namespace emulation {

// A body that runs until it suspends itself. The body never returns: it suspends for good at its end.
class Fiber {
  public:
    explicit Fiber(std::function<void()> body);
    ~Fiber();
    Fiber(const Fiber &) = delete;
    Fiber &operator=(const Fiber &) = delete;

    // Runs the body, from its start or from where it was suspended, until it suspends itself.
    void resume();

    // Goes back to whoever resumed this fiber, which must be the one that runs.
    void suspend();

  private:
    static void start(unsigned upper, unsigned lower);

    std::function<void()> body;
    void *stack;
    bool started = false;
    ucontext_t first;
    jmp_buf own, caller;
};

}  // namespace emulation
