// What the sources use of the C library's <math.h> beside its functions, which NVRTC declares itself. The NaN has the
// bits of the C library's.
#pragma once

#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
