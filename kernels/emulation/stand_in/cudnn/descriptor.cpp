#include "descriptor.h"
#include "../settings.h"

#include <cstring>

namespace stand_in {

namespace {

// How an attribute comes into a descriptor.
enum class Use { REQUIRED, OPTIONAL, TOLD };

const int64_t MANY = 1 << 20;
const int NO_KIND = -1;

struct Rule {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    Use use;
    int64_t most;
    // What a descriptor that it names must be.
    int refers;
    // The first version that has it.
    uint64_t since;
};

struct Kind {
    const char *name;
    uint64_t since;
    std::vector<Rule> rules;
};

Rule value(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, Use use = Use::REQUIRED, int64_t most = 1,
           uint64_t since = 0) {
    return {name, type, use, most, NO_KIND, since};
}

Rule refers(cudnnBackendAttributeName_t name, int kind, Use use = Use::REQUIRED, int64_t most = 1, uint64_t since = 0) {
    return {name, CUDNN_TYPE_BACKEND_DESCRIPTOR, use, most, kind, since};
}

Rule tensor(cudnnBackendAttributeName_t name, Use use = Use::REQUIRED, uint64_t since = 0) {
    return refers(name, CUDNN_BACKEND_TENSOR_DESCRIPTOR, use, 1, since);
}

const Use OPTIONAL = Use::OPTIONAL, TOLD = Use::TOLD;

// Every kind and every attribute that the stand-in knows; cudnn_graph.h has more of both.
const std::map<int, Kind> &kinds() {
    static const std::map<int, Kind> known = {
        {CUDNN_BACKEND_TENSOR_DESCRIPTOR,
         {"TENSOR",
          0,
          {value(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE),
           value(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, Use::REQUIRED, 8),
           value(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, Use::REQUIRED, 8),
           value(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64),
           value(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64),
           value(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, OPTIONAL),
           value(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, OPTIONAL), tensor(CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, OPTIONAL)}}},
        {CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
         {"POINTWISE",
          0,
          {value(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE),
           value(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE),
           value(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, OPTIONAL)}}},
        {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
         {"OPERATION_POINTWISE",
          0,
          {refers(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, CUDNN_BACKEND_POINTWISE_DESCRIPTOR),
           tensor(CUDNN_ATTR_OPERATION_POINTWISE_XDESC), tensor(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, OPTIONAL),
           tensor(CUDNN_ATTR_OPERATION_POINTWISE_YDESC), tensor(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, OPTIONAL),
           value(CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, CUDNN_TYPE_FLOAT, OPTIONAL),
           value(CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, CUDNN_TYPE_FLOAT, OPTIONAL)}}},
        {CUDNN_BACKEND_MATMUL_DESCRIPTOR, {"MATMUL", 0, {value(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE)}}},
        {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
         {"OPERATION_MATMUL",
          0,
          {refers(CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_BACKEND_MATMUL_DESCRIPTOR),
           tensor(CUDNN_ATTR_OPERATION_MATMUL_ADESC), tensor(CUDNN_ATTR_OPERATION_MATMUL_BDESC),
           tensor(CUDNN_ATTR_OPERATION_MATMUL_CDESC), tensor(CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, OPTIONAL),
           tensor(CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, OPTIONAL),
           tensor(CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, OPTIONAL)}}},
        {CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
         {"REDUCTION",
          0,
          {value(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE),
           value(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE),
           value(CUDNN_ATTR_REDUCTION_IS_DETERMINISTIC, CUDNN_TYPE_BOOLEAN, OPTIONAL)}}},
        {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
         {"OPERATION_REDUCTION",
          0,
          {refers(CUDNN_ATTR_OPERATION_REDUCTION_DESC, CUDNN_BACKEND_REDUCTION_DESCRIPTOR),
           tensor(CUDNN_ATTR_OPERATION_REDUCTION_XDESC), tensor(CUDNN_ATTR_OPERATION_REDUCTION_YDESC)}}},
        {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
         {"OPERATION_RESHAPE",
          0,
          {tensor(CUDNN_ATTR_OPERATION_RESHAPE_XDESC), tensor(CUDNN_ATTR_OPERATION_RESHAPE_YDESC),
           value(CUDNN_ATTR_OPERATION_RESHAPE_MODE, CUDNN_TYPE_RESHAPE_MODE, OPTIONAL, 1, 92200)}}},
        {CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR,
         {"OPERATION_DIAGONAL_BAND_MASK",
          92000,
          {tensor(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC), tensor(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC),
           tensor(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC),
           value(CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE, CUDNN_TYPE_POINTWISE_MODE)}}},
        {CUDNN_BACKEND_OPERATION_SOFTMAX_DESCRIPTOR,
         {"OPERATION_SOFTMAX",
          92000,
          {tensor(CUDNN_ATTR_OPERATION_SOFTMAX_XDESC), tensor(CUDNN_ATTR_OPERATION_SOFTMAX_YDESC),
           tensor(CUDNN_ATTR_OPERATION_SOFTMAX_STATS_DESC, OPTIONAL)}}},
        {CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR,
         {"OPERATION_SDPA_FWD",
          91300,
          {tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC), tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC),
           tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC), tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC),
           tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC, OPTIONAL),
           tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_QDESC, OPTIONAL, 91500),
           tensor(CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_KVDESC, OPTIONAL, 91500),
           refers(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, OPTIONAL),
           value(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, CUDNN_TYPE_INT64, OPTIONAL),
           value(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, CUDNN_TYPE_INT64, OPTIONAL),
           refers(CUDNN_ATTR_OPERATION_SDPA_FWD_SOFTMAX_DESC, CUDNN_BACKEND_OPERATION_SOFTMAX_DESCRIPTOR)}}},
        {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
         {"OPERATIONGRAPH",
          0,
          {refers(CUDNN_ATTR_OPERATIONGRAPH_OPS, NO_KIND, Use::REQUIRED, MANY),
           value(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, OPTIONAL),
           value(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, CUDNN_TYPE_INT64, TOLD)}}},
        {CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR,
         {"DEVICEPROP",
          90800,
          {value(CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, OPTIONAL),
           value(CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, OPTIONAL),
           value(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, OPTIONAL, MANY)}}},
        {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
         {"ENGINEHEUR",
          0,
          {value(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE),
           refers(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR),
           refers(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, OPTIONAL),
           refers(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, TOLD, MANY)}}},
        {CUDNN_BACKEND_ENGINE_DESCRIPTOR,
         {"ENGINE",
          0,
          {refers(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR),
           value(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64),
           refers(CUDNN_ATTR_ENGINE_DEVICEPROP, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, OPTIONAL),
           value(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, TOLD, MANY),
           value(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE, TOLD, MANY)}}},
        {CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR,
         {"KNOB_CHOICE",
          0,
          {value(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE),
           value(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64)}}},
        {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
         {"ENGINECFG",
          0,
          {refers(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR),
           refers(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, OPTIONAL, MANY),
           value(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, TOLD),
           value(CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED, CUDNN_TYPE_INT32, TOLD)}}},
        {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
         {"EXECUTION_PLAN",
          0,
          {refers(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR),
           value(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, OPTIONAL),
           refers(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, OPTIONAL),
           value(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, TOLD)}}},
        {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
         {"VARIANT_PACK",
          0,
          {value(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, Use::REQUIRED, MANY),
           value(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, Use::REQUIRED, MANY),
           value(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, OPTIONAL)}}},
    };
    return known;
}

const Rule &rule_of(const Descriptor &descriptor, cudnnBackendAttributeName_t name) {
    for (const Rule &rule : kinds().at(descriptor.kind).rules) {
        if (rule.name == name) {
            return rule;
        }
    }
    refuse(CUDNN_STATUS_NOT_SUPPORTED, "attribute %d is not one of a %s descriptor that is known here", int(name),
           name_of(descriptor.kind).c_str());
}

template <typename T> std::vector<T> elements(const Value &value) {
    std::vector<T> found(size_t(value.count));
    std::memcpy(found.data(), value.bytes.data(), found.size() * sizeof(T));
    return found;
}

}  // namespace

void refuse(cudnnStatus_t status, const char *format, ...) {
    char reason[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    throw Refusal{status, reason};
}

uint64_t version() { return number_setting("STAND_IN_CUDNN_VERSION", 92800); }

size_t element_bytes(cudnnBackendAttributeType_t type) {
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
    }
}

std::string name_of(cudnnBackendDescriptorType_t kind) { return kinds().at(kind).name; }

void check_kind(cudnnBackendDescriptorType_t kind) {
    const auto found = kinds().find(kind);
    if (found == kinds().end()) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "descriptors of kind %d are not known here", int(kind));
    }
    if (version() < found->second.since) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "%s descriptors are there from version %d on", found->second.name, int(found->second.since));
    }
}

void set(Descriptor &descriptor, cudnnBackendAttributeName_t name, Value value) {
    const std::string kind = name_of(descriptor.kind);
    if (descriptor.finalized) {
        refuse(CUDNN_STATUS_BAD_PARAM, "attribute %d of a %s that is finalized", int(name), kind.c_str());
    }
    const Rule &rule = rule_of(descriptor, name);
    if (rule.use == Use::TOLD || version() < rule.since) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "attribute %d of a %s cannot be set in version %d", int(name), kind.c_str(), int(version()));
    }
    if (value.type != rule.type) {
        refuse(CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE, "attribute %d of a %s has type %d, not %d", int(name), kind.c_str(),
               int(rule.type), int(value.type));
    }
    if (value.count < 1 || value.count > rule.most) {
        refuse(CUDNN_STATUS_BAD_PARAM, "attribute %d of a %s has from 1 to %d elements, not %d", int(name), kind.c_str(),
               int(rule.most), int(value.count));
    }
    for (const Shared &named : value.descriptors) {
        if (!named->finalized) {
            refuse(CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED, "attribute %d of a %s names a %s that is not finalized", int(name),
                   kind.c_str(), name_of(named->kind).c_str());
        }
        if (rule.refers != NO_KIND && rule.refers != named->kind) {
            refuse(CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE, "attribute %d of a %s names a %s", int(name), kind.c_str(),
                   name_of(named->kind).c_str());
        }
    }
    descriptor.attributes[name] = std::move(value);
}

void check_complete(const Descriptor &descriptor) {
    for (const Rule &rule : kinds().at(descriptor.kind).rules) {
        if (rule.use == Use::REQUIRED && !descriptor.has(rule.name)) {
            refuse(CUDNN_STATUS_BAD_PARAM, "a %s lacks its attribute %d", name_of(descriptor.kind).c_str(), int(rule.name));
        }
    }
}

void tell(Descriptor &descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::vector<int64_t> numbers) {
    Value value = {type, int64_t(numbers.size()), {}, {}};
    for (const int64_t number : numbers) {
        // Little-endian: the first bytes are those of a smaller type.
        const auto *bytes = reinterpret_cast<const unsigned char *>(&number);
        value.bytes.insert(value.bytes.end(), bytes, bytes + element_bytes(type));
    }
    descriptor.attributes[name] = std::move(value);
}

void tell(Descriptor &descriptor, cudnnBackendAttributeName_t name, std::vector<Shared> descriptors) {
    descriptor.attributes[name] = {CUDNN_TYPE_BACKEND_DESCRIPTOR, int64_t(descriptors.size()), {}, std::move(descriptors)};
}

int64_t Descriptor::number(cudnnBackendAttributeName_t name, int64_t otherwise) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) {
        return otherwise;
    }
    int64_t number = 0;
    std::memcpy(&number, found->second.bytes.data(), element_bytes(found->second.type));
    return number;
}

float Descriptor::real(cudnnBackendAttributeName_t name, float otherwise) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? otherwise : elements<float>(found->second)[0];
}

std::vector<int64_t> Descriptor::numbers(cudnnBackendAttributeName_t name) const { return elements<int64_t>(attributes.at(name)); }

std::vector<void *> Descriptor::pointers(cudnnBackendAttributeName_t name) const { return elements<void *>(attributes.at(name)); }

std::string Descriptor::text(cudnnBackendAttributeName_t name) const {
    const std::vector<char> letters = elements<char>(attributes.at(name));
    return std::string(letters.begin(), letters.end());
}

std::vector<Shared> Descriptor::descriptors(cudnnBackendAttributeName_t name) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? std::vector<Shared>{} : found->second.descriptors;
}

Shared Descriptor::descriptor(cudnnBackendAttributeName_t name) const {
    const std::vector<Shared> named = descriptors(name);
    return named.empty() ? nullptr : named[0];
}

}  // namespace stand_in
