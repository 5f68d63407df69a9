// Stacks that take turns on one thread of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

// Room for stacks, in one piece: whether an address is on any of them is one comparison.
class Stacks {
  public:
    explicit Stacks(size_t count);
    ~Stacks();
    Stacks(const Stacks &) = delete;
    Stacks &operator=(const Stacks &) = delete;

    // Where a stack begins, and how long it is. The page below it is protected, so that an overflow faults instead of
    // writing into another stack.
    struct Stack {
        char *start;
        size_t bytes;
    };
    Stack stack(size_t index);
    bool hold(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(first) < bytes; }

  private:
    char *first;
    size_t bytes;
};

// A body that runs until it suspends itself. It never returns: at its end it suspends for the last time.
class Fiber {
  public:
    Fiber(Stacks::Stack stack, std::function<void()> body) : body(std::move(body)), stack(stack) {}
    Fiber(const Fiber &) = delete;
    Fiber &operator=(const Fiber &) = delete;

    // Runs the body, from its start or from where it was suspended, until it suspends itself.
    void resume();

    // Suspends this fiber, which must be the running one, and returns to the caller of `resume` that started the chain
    // of switches to it.
    void suspend();

    // Suspends this fiber, which must be the running one, and switches to another.
    void hand_over(Fiber &other);

  private:
    static void start(unsigned upper, unsigned lower);
    void begin();
    void go_on();

    std::function<void()> body;
    Stacks::Stack stack;
    bool started = false;
    // As `__builtin_setjmp` leaves it.
    void *own[5];
};

}  // namespace emulation
