/* What cuDNN needs of cuBLASLt to be loaded; attention uses none of its products. */
#include <stddef.h>

size_t cublasLtGetVersion(void) { return 130000; }
