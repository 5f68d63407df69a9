// AdamW (Loshchilov and Hutter 2019) on a range of parameters, in every form of its states.
//
// A warp updates a block of 256 elements, a pack a lane: as many as share the `absmax` of quantised moments, so that
// no form needs more than a warp to agree. States are read into f32, updated, and written back; products are not
// fused, and every form gives the CPU's bits.
#include "pack.cuh"
#include "quantise.cuh"
#include "random.cuh"
#include "split.cuh"
#include "unfused.cuh"

// Threads of a block, and blocks of 256 that each of its warps updates: fewer blocks fill fewer maps.
constexpr int THREADS = 256;
constexpr int ROUNDS = 8;

// The numbers of one update; `rates` and `clip` are those of `kernels::AdamW`.
struct Rates {
    Unfused gradient_scale, beta1, beta2, eps;
    // 1 - learning rate x weight decay.
    Unfused keep;
    // Learning rate / (1 - beta1^t).
    Unfused step_size;
    // 1 / sqrt(1 - beta2^t).
    Unfused root_scale;

    __device__ Rates(const float *rates, const float *clip, float beta1, float beta2, float eps, float weight_decay)
        : gradient_scale{clip[1]}, beta1{beta1}, beta2{beta2}, eps{eps},
          keep(Unfused{1.0f} - Unfused{rates[0]} * Unfused{weight_decay}),
          step_size(Unfused{rates[0]} * Unfused{rates[1]}), root_scale{rates[2]} {}
};

// 32 random bits for each element, by its place among all parameters.
struct Random {
    uint64_t key, first_index;

    __device__ Random(const uint32_t *key, size_t first_index)
        : key(uint64_t(key[1]) << 32 | key[0]), first_index(first_index) {}

    // Weights and moments must not be rounded alike.
    __device__ uint32_t of_weight(size_t element) const { return random_u32(~key, first_index + element); }
    __device__ uint32_t of_moments(size_t element) const { return random_u32(key, first_index + element); }
};

// Forms of weights: made from the parameters and what stands beside them.

struct F32Weights {
    float *weights;

    __device__ F32Weights(void *parameters, void *) : weights(static_cast<float *>(parameters)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(weights, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        store<WIDE>(weights, first, n, pack);
    }
};

struct MasterWeights {
    bf16 *weights;
    float *master;

    __device__ MasterWeights(void *parameters, void *beside)
        : weights(static_cast<bf16 *>(parameters)), master(static_cast<float *>(beside)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(master, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        Elements<bf16> halves;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            halves.at[i] = split_weight(pack.at[i]);
        }
        store<WIDE>(master, first, n, pack);
        store_elements<WIDE>(weights, first, n, halves);
    }
};

struct SplitWeights {
    bf16 *weights;
    int16_t *remainders;

    __device__ SplitWeights(void *parameters, void *beside)
        : weights(static_cast<bf16 *>(parameters)), remainders(static_cast<int16_t *>(beside)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const {
        const Elements<bf16> halves = load_elements<WIDE>(weights, first, n, narrow<bf16>(0.0f));
        const Elements<int16_t> rest = load_elements<WIDE>(remainders, first, n, int16_t(0));
        Pack pack;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            pack.at[i] = join(halves.at[i], rest.at[i]);
        }
        return pack;
    }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &) const {
        Elements<bf16> halves;
        Elements<int16_t> rest;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            halves.at[i] = split_weight(pack.at[i]);
            rest.at[i] = split_remainder(pack.at[i]);
        }
        store_elements<WIDE>(weights, first, n, halves);
        store_elements<WIDE>(remainders, first, n, rest);
    }
};

struct RoundedWeights {
    bf16 *weights;

    __device__ RoundedWeights(void *parameters, void *) : weights(static_cast<bf16 *>(parameters)) {}
    template <bool WIDE> __device__ Pack read(size_t first, size_t n) const { return load<WIDE>(weights, first, n); }
    template <bool WIDE> __device__ void write(const Pack &pack, size_t first, size_t n, const Random &random) const {
        Elements<bf16> halves;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            halves.at[i] = round_stochastically(pack.at[i], random.of_weight(first + i) & 0xffff);
        }
        store_elements<WIDE>(weights, first, n, halves);
    }
};

// Both moments of a pack of elements.
struct Moments {
    Pack first, second;
};

// Forms of moments: made from the first and the second and, where they are codes, the `absmax` of each.

struct F32Moments {
    float *m, *v;

    __device__ F32Moments(void *m, void *v, float *, float *) : m(static_cast<float *>(m)), v(static_cast<float *>(v)) {}
    template <bool WIDE> __device__ Moments read(size_t first, size_t n) const {
        return {load<WIDE>(m, first, n), load<WIDE>(v, first, n)};
    }
    template <bool WIDE> __device__ void write(const Moments &moments, size_t first, size_t n, const Random &) const {
        store<WIDE>(m, first, n, moments.first);
        store<WIDE>(v, first, n, moments.second);
    }
};

struct Bf16Moments {
    bf16 *m, *v;

    __device__ Bf16Moments(void *m, void *v, float *, float *) : m(static_cast<bf16 *>(m)), v(static_cast<bf16 *>(v)) {}
    template <bool WIDE> __device__ Moments read(size_t first, size_t n) const {
        return {load<WIDE>(m, first, n), load<WIDE>(v, first, n)};
    }
    template <bool WIDE> __device__ void write(const Moments &moments, size_t first, size_t n, const Random &random) const {
        Elements<bf16> of_m, of_v;
#pragma unroll
        for (int i = 0; i < PACK; i++) {
            const uint32_t bits = random.of_moments(first + i);
            of_m.at[i] = round_stochastically(moments.first.at[i], bits & 0xffff);
            of_v.at[i] = round_stochastically(moments.second.at[i], bits >> 16);
        }
        store_elements<WIDE>(m, first, n, of_m);
        store_elements<WIDE>(v, first, n, of_v);
    }
};

__device__ inline Map<true> signed_map() {
    SHARED(float, values, CODES);
    SHARED(uint32_t, words, Map<true>::WORDS);
    const Map<true> map = {values, words};
    map.fill();
    return map;
}

__device__ inline Map<false> unsigned_map() {
    SHARED(float, values, CODES);
    SHARED(uint32_t, words, Map<false>::WORDS);
    const Map<false> map = {values, words};
    map.fill();
    return map;
}

struct CodedMoments {
    uint8_t *m, *v;
    float *m_absmax, *v_absmax;
    Map<true> m_map;
    Map<false> v_map;

    // All threads of a block make it together.
    __device__ CodedMoments(void *m, void *v, float *m_absmax, float *v_absmax)
        : m(static_cast<uint8_t *>(m)), v(static_cast<uint8_t *>(v)), m_absmax(m_absmax), v_absmax(v_absmax),
          m_map(signed_map()), v_map(unsigned_map()) {
        __syncthreads();
    }
    template <bool WIDE> __device__ Moments read(size_t first, size_t n) const {
        return {load_codes<WIDE>(m_map, m, m_absmax, first, n), load_codes<WIDE>(v_map, v, v_absmax, first, n)};
    }
    template <bool WIDE> __device__ void write(const Moments &moments, size_t first, size_t n, const Random &) const {
        store_codes<WIDE>(m_map, m, m_absmax, first, n, moments.first);
        store_codes<WIDE>(v_map, v, v_absmax, first, n, moments.second);
    }
};

__device__ inline void step(float &weight, float &first_moment, float &second_moment, float raw, const Rates &rates) {
    const Unfused one = {1.0f}, gradient = Unfused{raw} * rates.gradient_scale;
    const Unfused m = rates.beta1 * Unfused{first_moment} + (one - rates.beta1) * gradient;
    const Unfused v = rates.beta2 * Unfused{second_moment} + (one - rates.beta2) * gradient * gradient;
    const Unfused divisor = root(v) * rates.root_scale + rates.eps;
    weight = (Unfused{weight} * rates.keep - rates.step_size * m / divisor).value;
    first_moment = m.value;
    second_moment = v.value;
}

// Every lane of a warp that has elements stays to the end: quantised moments are reduced over the warp. `aligned`: whether all
// tensors are, for wide accesses.
template <typename WeightsForm, typename MomentsForm, typename G>
__device__ void adamw(const WeightsForm &weights, const MomentsForm &moments, const G *gradients, bool aligned,
                      const Rates &rates, const Random &random, size_t n) {
    // In all blocks but the last, every lane has elements in every round.
    knowing(aligned && (size_t(blockIdx.x) + 1) * ROUNDS * THREADS * PACK <= n, [&](auto whole) {
        constexpr bool WIDE = decltype(whole)();
        for (int round = 0; round < ROUNDS; round++) {
            const size_t first = ((size_t(blockIdx.x) * ROUNDS + round) * THREADS + threadIdx.x) * PACK;
            if (!WIDE && first / BLOCK * BLOCK >= n) {
                return;
            }
            Pack weight = weights.template read<WIDE>(first, n);
            // Before the moments, whose codes are looked up as soon as they are there.
            const Pack gradient = load<WIDE>(gradients, first, n);
            Moments moment = moments.template read<WIDE>(first, n);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                step(weight.at[i], moment.first.at[i], moment.second.at[i], gradient.at[i], rates);
            }
            weights.template write<WIDE>(weight, first, n, random);
            moments.template write<WIDE>(moment, first, n, random);
        }
    });
}

// A factor that is not finite leaves all as it was. Pointers that a form has no use for are null.
#define ADAMW(W, M, G, name)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                          \
        adamw_##name(void *parameters, void *beside, void *first_moment, void *second_moment, float *first_absmax, \
                     float *second_absmax, const G *gradients, const float *rates, const float *clip,              \
                     const uint32_t *key, size_t first_index, float beta1, float beta2, float eps,                 \
                     float weight_decay, size_t n) {                                                               \
        if (isfinite(clip[1])) {                                                                                   \
            adamw(W(parameters, beside), M(first_moment, second_moment, first_absmax, second_absmax), gradients,   \
                  are_wide(PACK, parameters, beside, first_moment, second_moment, gradients),                      \
                  Rates(rates, clip, beta1, beta2, eps, weight_decay), Random(key, first_index), n);               \
        }                                                                                                          \
    }                                                                                                              \
    EXPORT(adamw_##name)

#define ADAMW_OF(W, name)                             \
    ADAMW(W, F32Moments, float, name##_f32_f32);      \
    ADAMW(W, F32Moments, bf16, name##_f32_bf16);      \
    ADAMW(W, Bf16Moments, float, name##_bf16_f32);    \
    ADAMW(W, Bf16Moments, bf16, name##_bf16_bf16);    \
    ADAMW(W, CodedMoments, float, name##_8bit_f32);   \
    ADAMW(W, CodedMoments, bf16, name##_8bit_bf16)

ADAMW_OF(F32Weights, f32);
ADAMW_OF(MasterWeights, master);
ADAMW_OF(SplitWeights, split);
ADAMW_OF(RoundedWeights, rounded);
