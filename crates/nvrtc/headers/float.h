// What the sources use of the C library's <float.h>, which NVRTC does not have.
#pragma once

#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
