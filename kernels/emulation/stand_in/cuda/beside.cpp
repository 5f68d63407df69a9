// Functions for the other stand-ins, which find them by name.
#include "memory.h"

using namespace stand_in;

extern "C" int stand_in_current_capability() {
    const std::lock_guard<std::recursive_mutex> entered(lock());
    return current_context() == nullptr ? 0 : capability();
}
