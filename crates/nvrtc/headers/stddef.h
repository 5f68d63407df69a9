// NVRTC declares `size_t` itself, and lacks the header.
#pragma once
