// What candle calls of cuBLAS and cuRAND when it opens a device. Nothing is computed.
typedef void *Handle;

static int handle;

static int create(Handle *out) {
    *out = &handle;
    return 0;
}

int cublasCreate_v2(Handle *out) { return create(out); }
int cublasDestroy_v2(Handle of) { return (void)of, 0; }
int cublasSetStream_v2(Handle of, void *stream) { return (void)of, (void)stream, 0; }
int curandCreateGenerator(Handle *out, int kind) { return (void)kind, create(out); }
int curandDestroyGenerator(Handle of) { return (void)of, 0; }
int curandSetPseudoRandomGeneratorSeed(Handle of, unsigned long long seed) { return (void)of, (void)seed, 0; }
int curandSetStream(Handle of, void *stream) { return (void)of, (void)stream, 0; }
