// The library's functions: descriptions, the choice of an algorithm, products. A product runs when it is asked for,
// whatever its stream, or when its graph is launched.
#include "../settings.h"
#include "first_use.h"
#include "product.h"

#include <algorithm>
#include <cstring>
#include <fstream>

using namespace stand_in;

namespace {

struct Preference {
    uint64_t workspace_bytes_max = 0;
    uint32_t reduction_schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment_bytes[4] = {256, 256, 256, 256};
};

// The stand-in's contents of `cublasLtMatmulAlgo_t`: an algorithm, and what it was chosen for.
struct Algorithm {
    // Marks bytes that are an algorithm.
    uint64_t mark;
    // In the order of the heuristic, from 0. It adds a sum up of so many parts and one more.
    uint64_t number;
    uint64_t workspace_bytes;
    uint32_t alignment_bytes[4];
};

const uint64_t MARK = 0x6d68746972676c61;

static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "an algorithm has 64 bytes");

// Sums in one piece, or in parts of the compute type. These give the same bits in any order of blocks, and round no
// part.
const uint32_t REDUCTIONS = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

// Sums of this length and longer have no algorithm that keeps their parts in the compute type.
bool has_rounded_parts(const Product &product) {
    static const uint64_t depth_min = number_setting("STAND_IN_ROUNDED_DEPTH", UINT64_MAX);
    return (product.description.a_transposed ? product.a.rows : product.a.columns) >= depth_min;
}

// How many algorithms there are for each product.
uint64_t algorithms() {
    static const uint64_t count = number_setting("STAND_IN_ALGORITHMS", 4);
    return count;
}

// With less workspace than this, the only algorithm is one that needs none.
const uint64_t WORKSPACE_BYTES = 256 << 10;

Description &of(cublasLtMatmulDesc_t handle) { return *reinterpret_cast<Description *>(handle); }
Layout &of(cublasLtMatrixLayout_t handle) { return *reinterpret_cast<Layout *>(handle); }
Preference &of(cublasLtMatmulPreference_t handle) { return *reinterpret_cast<Preference *>(handle); }

// Sets a value of the attribute's size, and refuses others.
template <typename T> cublasStatus_t set(T &value, const void *from, size_t bytes) {
    if (from == nullptr || bytes != sizeof(T)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    std::memcpy(&value, from, sizeof(T));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t set_transposed(bool &transposed, const void *from, size_t bytes) {
    int32_t operation = CUBLAS_OP_N;
    const cublasStatus_t status = set(operation, from, bytes);
    if (status != CUBLAS_STATUS_SUCCESS || (operation != CUBLAS_OP_N && operation != CUBLAS_OP_T)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    transposed = operation == CUBLAS_OP_T;
    return status;
}

// Of all epilogues only a bias.
cublasStatus_t set_epilogue(Description &description, const void *from, size_t bytes) {
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const cublasStatus_t status = set(epilogue, from, bytes);
    if (status != CUBLAS_STATUS_SUCCESS) {
        return status;
    }
    if (epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    description.has_bias = epilogue == CUBLASLT_EPILOGUE_BIAS;
    return status;
}

cublasStatus_t refuse(cublasStatus_t status, const char *why) {
    say("cuBLASLt", "%s", why);
    return status;
}

// Whether a matrix, the first one of a batch, is zero everywhere.
bool is_zero(const Layout &layout, const void *data) {
    const auto *bytes = static_cast<const char *>(data);
    const size_t size = layout.element_bytes() * (size_t(layout.leading) * (layout.columns - 1) + layout.rows);
    return std::all_of(bytes, bytes + size, [](char byte) { return byte == 0; });
}

// Adds a line to the file that STAND_IN_OPERANDS names: whether what is multiplied is data or nothing but zeros.
void note_operands(const Product &product, const void *a, const void *b) {
    static const std::string path = setting("STAND_IN_OPERANDS", "");
    if (!path.empty()) {
        const bool zeros = is_zero(product.a, a) || is_zero(product.b, b);
        std::ofstream(path, std::ios::app) << (zeros ? "zeros" : "data") << '\n';
    }
}

cublasStatus_t check_layout(const Layout &layout, uint64_t rows, uint64_t columns, int32_t batch) {
    if (layout.rows != rows || layout.columns != columns || layout.batch != batch || batch < 1) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "sizes do not go together");
    }
    if (layout.leading < int64_t(rows) || rows == 0 || columns == 0) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "columns overlap, or there are none");
    }
    return CUBLAS_STATUS_SUCCESS;
}

// The types that cuBLASLt documents for CUBLAS_COMPUTE_32F, as far as a product of ours could ask for them.
bool is_supported(const Product &product) {
    const auto &[description, a, b, c, d] = product;
    const bool f32 = a.type == CUDA_R_32F && d.type == CUDA_R_32F;
    const bool bf16 = a.type == CUDA_R_16BF && (d.type == CUDA_R_16BF || d.type == CUDA_R_32F);
    const bool fp8 = a.is_fp8() && b.is_fp8() && (a.type == CUDA_R_8F_E4M3 || b.type == CUDA_R_8F_E4M3) &&
                     (d.type == CUDA_R_16BF || d.type == CUDA_R_32F);
    return description.compute == CUBLAS_COMPUTE_32F && description.scale == CUDA_R_32F && c.type == d.type &&
           (fp8 || (a.type == b.type && (f32 || bf16)));
}

// What products of FP8 ask for besides: a GPU that has them, both operands with the summed axis innermost, 16 bytes at a time.
cublasStatus_t check_fp8(const Product &product) {
    const auto &[description, a, b, c, d] = product;
    if (!a.is_fp8()) {
        const bool scaled = description.a_scale != nullptr || description.b_scale != nullptr || description.fast_accumulation != 0;
        return scaled ? refuse(CUBLAS_STATUS_INVALID_VALUE, "scales or fast accumulation of matrices that are not FP8") : CUBLAS_STATUS_SUCCESS;
    }
    if (current_capability() < 89) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "FP8 on a GPU before 8.9");
    }
    if (!description.a_transposed || description.b_transposed) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "FP8 where the summed axis is not innermost");
    }
    const uint64_t sizes[] = {a.rows, uint64_t(a.leading), uint64_t(b.leading), d.rows * d.element_bytes(),
                              uint64_t(c.leading) * c.element_bytes(), uint64_t(d.leading) * d.element_bytes()};
    for (const uint64_t size : sizes) {
        if (size % 16 != 0) {
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a size of FP8 that is no multiple of 16 bytes");
        }
    }
    // Seen with 13.1 on an H100: products ran, or not, by where their scales lay.
    for (const void *scale : {description.a_scale, description.b_scale}) {
        if (reinterpret_cast<uintptr_t>(scale) % 16 != 0) {
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a scale at no multiple of 16 bytes");
        }
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check(const Product &product) {
    if (!is_supported(product)) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no product of these types");
    }
    if (const cublasStatus_t status = check_fp8(product)) {
        return status;
    }
    const cudaDataType bias_type = product.a.is_fp8() ? CUDA_R_16BF : product.d.type;
    const uintptr_t bias = reinterpret_cast<uintptr_t>(product.description.bias);
    if (product.description.has_bias && (product.description.bias_type != bias_type || bias == 0 || bias % 16 != 0)) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a bias of another type than the result, or without its alignment");
    }
    const auto &[description, a, b, c, d] = product;
    const uint64_t m = d.rows, n = d.columns, k = description.a_transposed ? a.rows : a.columns;
    const auto [a_rows, a_columns] = description.a_transposed ? std::pair(k, m) : std::pair(m, k);
    const auto [b_rows, b_columns] = description.b_transposed ? std::pair(n, k) : std::pair(k, n);
    const cublasStatus_t checked[] = {check_layout(a, a_rows, a_columns, d.batch),
                                      check_layout(b, b_rows, b_columns, d.batch), check_layout(c, m, n, d.batch),
                                      check_layout(d, m, n, d.batch)};
    if (d.batch > 1 && std::abs(d.batch_stride) < int64_t(m)) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "results overlap");
    }
    return *std::max_element(std::begin(checked), std::end(checked));
}

}  // namespace

extern "C" cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = reinterpret_cast<cublasLtHandle_t>(new char);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<char *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" size_t cublasLtGetVersion() { return number_setting("STAND_IN_LIBRARY_VERSION", 120904); }

extern "C" cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *description, cublasComputeType_t compute,
                                                   cudaDataType_t scale) {
    *description = reinterpret_cast<cublasLtMatmulDesc_t>(new Description{compute, scale, false, false, false, CUDA_R_32F, nullptr, nullptr, nullptr, 0});
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    delete &of(description);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                                         cublasLtMatmulDescAttributes_t attribute, const void *value,
                                                         size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return set_transposed(of(description).a_transposed, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return set_transposed(of(description).b_transposed, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return set_epilogue(of(description), value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(of(description).bias, value, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(of(description).a_scale, value, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(of(description).b_scale, value, bytes);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return set(of(description).fast_accumulation, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return set(of(description).bias_type, value, bytes);
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

extern "C" cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                                     uint64_t columns, int64_t leading) {
    *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, leading, 1, 0});
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete &of(layout);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                           cublasLtMatrixLayoutAttribute_t attribute,
                                                           const void *value, size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(of(layout).batch, value, bytes);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(of(layout).batch_stride, value, bytes);
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

extern "C" cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete &of(preference);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                               cublasLtMatmulPreferenceAttributes_t attribute,
                                                               const void *value, size_t bytes) {
    Preference &preference = of(handle);
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(preference.workspace_bytes_max, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(preference.reduction_schemes, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return set(preference.alignment_bytes[0], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return set(preference.alignment_bytes[1], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return set(preference.alignment_bytes[2], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return set(preference.alignment_bytes[3], value, bytes);
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

extern "C" cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                                         cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                         cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                         cublasLtMatmulPreference_t handle, int wanted,
                                                         cublasLtMatmulHeuristicResult_t *results, int *found) {
    *found = 0;
    const Product product = {of(description), of(a), of(b), of(c), of(d)};
    const Preference &preference = of(handle);
    if (wanted < 1) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (has_rounded_parts(product) && preference.reduction_schemes == REDUCTIONS) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const uint32_t wanted_schemes = has_rounded_parts(product) ? uint32_t(CUBLASLT_REDUCTION_SCHEME_MASK) : REDUCTIONS;
    if (preference.reduction_schemes != wanted_schemes) {
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "parts of a sum may be rounded, or no sum may have parts");
    }
    if (const cublasStatus_t status = check(product)) {
        return status;
    }
    const size_t element_bytes[] = {product.a.element_bytes(), product.b.element_bytes(), product.c.element_bytes(),
                                    product.d.element_bytes()};
    Algorithm algorithm = {MARK, 0, preference.workspace_bytes_max < WORKSPACE_BYTES ? 0 : WORKSPACE_BYTES, {}};
    const Layout *layouts[] = {&product.a, &product.b, &product.c, &product.d};
    for (int matrix = 0; matrix < 4; matrix++) {
        const uint32_t bytes = preference.alignment_bytes[matrix];
        const Layout &layout = *layouts[matrix];
        algorithm.alignment_bytes[matrix] = bytes;
        if (bytes < element_bytes[matrix]) {
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "elements are not aligned");
        }
        // Distances count as addresses do (CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES).
        const uint64_t distances = uint64_t(layout.leading) | uint64_t(layout.batch_stride);
        if (distances * element_bytes[matrix] % bytes != 0) {
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a column is less aligned than the first one");
        }
    }
    *found = int(std::min<uint64_t>(uint64_t(wanted), algorithms()));
    for (int number = 0; number < *found; number++) {
        algorithm.number = uint64_t(number);
        results[number] = {};
        std::memcpy(&results[number].algo, &algorithm, sizeof(algorithm));
        results[number].workspaceSize = algorithm.workspace_bytes;
        results[number].state = CUBLAS_STATUS_SUCCESS;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// Whether bytes are an algorithm that this library has.
extern "C" cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t description,
                                                  cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                  cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                  const cublasLtMatmulAlgo_t *asked,
                                                  cublasLtMatmulHeuristicResult_t *result) {
    const Product product = {of(description), of(a), of(b), of(c), of(d)};
    if (const cublasStatus_t status = check(product)) {
        return status;
    }
    Algorithm algorithm;
    std::memcpy(&algorithm, asked, sizeof(algorithm));
    if (algorithm.mark != MARK || algorithm.number >= algorithms()) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    *result = {};
    result->algo = *asked;
    result->workspaceSize = algorithm.workspace_bytes;
    result->state = CUBLAS_STATUS_SUCCESS;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void *alpha,
                                         const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                         cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                         cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                         const cublasLtMatmulAlgo_t *chosen, void *workspace, size_t workspace_bytes,
                                         cudaStream_t stream) {
    const Product product = {of(description), of(a_layout), of(b_layout), of(c_layout), of(d_layout)};
    if (const cublasStatus_t status = check(product)) {
        return status;
    }
    Algorithm algorithm;
    std::memcpy(&algorithm, chosen, sizeof(algorithm));
    if (algorithm.mark != MARK || algorithm.number >= algorithms()) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "an algorithm that this library does not have");
    }
    const void *matrices[] = {a, b, c, d};
    for (int matrix = 0; matrix < 4; matrix++) {
        if (reinterpret_cast<uintptr_t>(matrices[matrix]) % algorithm.alignment_bytes[matrix] != 0) {
            return refuse(CUBLAS_STATUS_INVALID_VALUE, "an address is less aligned than the algorithm was told");
        }
    }
    for (const void *matrix : matrices) {
        if (product.a.is_fp8() && reinterpret_cast<uintptr_t>(matrix) % 16 != 0) {
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "an address of FP8 that is no multiple of 16 bytes");
        }
    }
    if (c == d && !(product.c == product.d)) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "what is added lies where the result goes, and lies otherwise");
    }
    if (workspace_bytes < algorithm.workspace_bytes) {
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "the workspace is smaller than the algorithm needs");
    }
    if (!load_product(product, algorithm.alignment_bytes, algorithm.number)) {
        return CUBLAS_STATUS_INTERNAL_ERROR;
    }
    note_operands(product, a, b);
    pass_time(algorithm.number);
    const float factors[] = {*static_cast<const float *>(alpha), *static_cast<const float *>(beta)};
    const size_t lost_bytes = algorithm.workspace_bytes;
    const auto order = algorithm.number + 1;
    const auto work = [=, alpha = factors[0], beta = factors[1]] {
        if (!is_idle()) {
            // Overwrite the workspace, as the real library would.
            std::memset(workspace, 0xff, lost_bytes);
            compute(product, order, alpha, a, b, beta, c, d);
        }
    };
    if (!captures(stream, work)) {
        work();
    }
    return CUBLAS_STATUS_SUCCESS;
}
