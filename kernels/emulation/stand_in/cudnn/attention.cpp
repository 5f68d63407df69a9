// Attention in one operation, as described: scores, the inner graph on the scores, softmax, values.
#include "graph.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace stand_in {

namespace {

// The last two dimensions exchanged.
Dense transposed(const Tensor &tensor, const Dense &values, Sizes &dims) {
    const size_t rank = tensor.dims.size(), rows = size_t(tensor.dims[rank - 2]), columns = size_t(tensor.dims[rank - 1]);
    dims = tensor.dims;
    std::swap(dims[rank - 2], dims[rank - 1]);
    Dense result(values.size());
    for (size_t at = 0; at < values.size(); at++) {
        const size_t matrix = at / (rows * columns), row = at / columns % rows, column = at % columns;
        result[(matrix * columns + column) * rows + row] = values[at];
    }
    return result;
}

// Of every row: exponentials over their sum, and the logarithm of the sum of exponentials.
void soften(Dense &scores, Dense &stats, size_t columns) {
    for (size_t row = 0; row < stats.size(); row++) {
        float *begin = &scores[row * columns];
        float highest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
        for (size_t column = 0; column < columns; column++) {
            highest = std::max(highest, begin[column]);
        }
        for (size_t column = 0; column < columns; column++) {
            sum += begin[column] = std::exp(begin[column] - highest);
        }
        for (size_t column = 0; column < columns; column++) {
            begin[column] /= sum;
        }
        stats[row] = highest + std::log(sum);
    }
}

void check_shapes(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &o, const Softmax &softmax) {
    const bool rank = q.dims.size() == 4 && k.dims.size() == 4 && v.dims.size() == 4 && o.dims.size() == 4;
    if (!rank || q.dims[0] != k.dims[0] || k.dims[0] != v.dims[0] || q.dims[1] % k.dims[1] != 0 || q.dims[1] % v.dims[1] != 0 ||
        q.dims[3] != k.dims[3] || k.dims[2] != v.dims[2] || o.dims != Sizes{q.dims[0], q.dims[1], q.dims[2], v.dims[3]}) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "attention of q %s, k %s and v %s does not make %s", written(q.dims).c_str(),
               written(k.dims).c_str(), written(v.dims).c_str(), written(o.dims).c_str());
    }
    const Sizes scores = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]}, rows = {q.dims[0], q.dims[1], q.dims[2], 1};
    if (softmax.x[0].dims != scores || softmax.y[0].dims != scores || (!softmax.stats.empty() && softmax.stats[0].dims != rows)) {
        refuse(CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH, "softmax of %s is not that of scores %s", written(softmax.x[0].dims).c_str(),
               written(scores).c_str());
    }
}

// The tensor of a graph that has this number.
Tensor tensor_with(const Graph &graph, int64_t uid) {
    const auto found = graph.tensors.find(uid);
    if (found == graph.tensors.end()) {
        refuse(CUDNN_STATUS_BAD_PARAM, "the graph within an attention has no tensor %d", int(uid));
    }
    return found->second;
}

}  // namespace

std::shared_ptr<const Softmax> softmax_of(const Descriptor &descriptor) {
    auto made = std::make_shared<Softmax>();
    made->x = {tensor_at(descriptor, CUDNN_ATTR_OPERATION_SOFTMAX_XDESC)};
    made->y = {tensor_at(descriptor, CUDNN_ATTR_OPERATION_SOFTMAX_YDESC)};
    if (descriptor.has(CUDNN_ATTR_OPERATION_SOFTMAX_STATS_DESC)) {
        made->stats = {tensor_at(descriptor, CUDNN_ATTR_OPERATION_SOFTMAX_STATS_DESC)};
    }
    for (const Tensor *tensor : {&made->x[0], &made->y[0]}) {
        if (!tensor->is_virtual) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED, "scores in memory, tensor %d", int(tensor->uid));
        }
    }
    return made;
}

SharedOperation attention_of(const Descriptor &descriptor) {
    const Tensor &q = tensor_at(descriptor, CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC), &k = tensor_at(descriptor, CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC),
                 &v = tensor_at(descriptor, CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC), &o = tensor_at(descriptor, CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC);
    const Softmax softmax = *descriptor.made_of<Softmax>(CUDNN_ATTR_OPERATION_SDPA_FWD_SOFTMAX_DESC);
    check_shapes(q, k, v, o, softmax);
    const auto scale = descriptor.made_of<Tensor>(CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC);
    if (scale && !scale->is_by_value) {
        refuse(CUDNN_STATUS_NOT_SUPPORTED, "the scale, tensor %d, is not passed by value", int(scale->uid));
    }
    std::vector<Tensor> lengths;
    for (const auto name : {CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_QDESC, CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_KVDESC}) {
        if (descriptor.has(name)) {
            lengths.push_back(tensor_at(descriptor, name));
        }
    }
    const auto within = descriptor.made_of<Graph>(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH);
    // Softmax reads the result of the inner graph, whatever its number: NVIDIA's frontend gives it another.
    Tensor scores = softmax.x[0], softened = softmax.x[0];
    if (within) {
        scores = tensor_with(*within, descriptor.number(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, -1));
        softened = tensor_with(*within, descriptor.number(CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, -1));
        if (!scores.is_virtual || !softened.is_virtual || scores.dims != softmax.x[0].dims || softened.dims != softmax.x[0].dims) {
            refuse(CUDNN_STATUS_BAD_PARAM, "the graph within an attention makes tensor %d of %d, which are not scores of %s", int(softened.uid),
                   int(scores.uid), written(softmax.x[0].dims).c_str());
        }
        check_written(*within, scores.uid);
    }
    auto made = std::make_shared<Operation>();
    made->is_attention = true;
    made->reads = {q, k, v};
    made->reads.insert(made->reads.end(), lengths.begin(), lengths.end());
    made->lengths = lengths;
    made->writes = softmax.stats;
    made->writes.push_back(o);
    if (scale) {
        made->reads.push_back(*scale);
    }
    for (const auto &[uid, tensor] : within ? within->tensors : std::map<int64_t, Tensor>{}) {
        if (!tensor.is_virtual && within->writes(uid)) {
            refuse(CUDNN_STATUS_NOT_SUPPORTED, "the graph within an attention writes memory, tensor %d", int(uid));
        }
        if (!tensor.is_virtual) {
            made->reads.push_back(tensor);
        }
    }
    made->compute = [=](Values &values, Order order) {
        Sizes flipped;
        const Dense keys = transposed(k, values.read(k), flipped);
        Dense raw = product(q.dims, values.read(q), flipped, keys, scores.dims, Order::KEPT);
        const float factor = scale ? values.read(*scale)[0] : 1.0f;
        each_index(scores.dims, [&](const Sizes &index, size_t number) {
            const bool is_there = values.has(k, {index[0], 0, index[3], 0});
            raw[number] = is_there ? factor * raw[number] : -std::numeric_limits<float>::infinity();
        });
        values.write(scores, std::move(raw));
        for (const SharedOperation &operation : within ? within->operations : std::vector<SharedOperation>{}) {
            operation->compute(values, order);
        }
        Dense weights = values.read(softened);
        Dense stats(weights.size() / size_t(k.dims[2]));
        soften(weights, stats, size_t(k.dims[2]));
        if (!softmax.stats.empty()) {
            values.write(softmax.stats[0], std::move(stats));
        }
        values.write(softmax.y[0], std::move(weights));
        values.write(o, product(softmax.y[0].dims, values.read(softmax.y[0]), v.dims, values.read(v), o.dims, Order::KEPT));
    };
    return made;
}

}  // namespace stand_in
