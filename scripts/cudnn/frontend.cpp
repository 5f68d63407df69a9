// Attention of our layouts and settings, built by NVIDIA's frontend for the device that a file describes:
//
//   frontend DEVICE.json FOLDER|- 2x8x2x512x64 ...
//
// A shape is batch x heads x key-value heads x tokens x head width, with -packed behind it where queries, keys and values are
// columns of one tensor, and -raggedN where there is room for so many documents. Prints `shape pass workspace plan`, and writes
// the plans to the folder.
#include <cudnn_frontend.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iterator>

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}
namespace fe = cudnn_frontend;

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

struct Shape {
    int64_t batch, heads, kv_heads, tokens, width;
    bool is_packed;
    // None, or the most documents.
    int64_t documents;

    // Sequences of a graph.
    int64_t sequences() const { return documents != 0 ? documents : batch; }

    // Elements from a token's row of so many heads to the next.
    int64_t row(int64_t of_heads) const { return (is_packed ? heads + 2 * kv_heads : of_heads) * width; }
};

// How long documents are, and where their rows of q and of the output, of k and v, and of the statistics begin; empty without
// documents.
struct Documents {
    Tensor lengths, out, keys, rows;

    Documents(fe::graph::Graph &graph, const Shape &shape) {
        if (shape.documents == 0) {
            return;
        }
        const auto numbers = [&](const char *name, int64_t count) {
            return graph.tensor(fe::graph::Tensor_attributes()
                                    .set_name(name)
                                    .set_dim({count, 1, 1, 1})
                                    .set_stride({1, 1, 1, 1})
                                    .set_data_type(fe::DataType_t::INT32));
        };
        lengths = numbers("lengths", shape.documents);
        out = numbers("of_out", shape.documents + 1);
        keys = numbers("of_keys", shape.documents + 1);
        rows = numbers("of_rows", shape.documents + 1);
    }

    // For the forward or the backward pass.
    template <typename Options> void add_to(Options &options, const Shape &shape) const {
        if (lengths) {
            const int64_t tokens = shape.batch * shape.tokens;
            options.set_padding_mask(true).set_seq_len_q(lengths).set_seq_len_kv(lengths);
            options.set_max_total_seq_len_q(tokens).set_max_total_seq_len_kv(tokens);
        }
    }
};

// `[b, s, heads, d]` in memory, in rows of so many elements.
static fe::graph::Tensor_attributes rows(const Shape &shape, const char *name, int64_t heads, int64_t row, const Tensor &offsets) {
    auto attributes = fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_dim({shape.sequences(), heads, shape.tokens, shape.width})
                          .set_stride({shape.tokens * row, shape.width, row, 1});
    return offsets ? attributes.set_ragged_offset(offsets) : attributes;
}

static void write_as(const Tensor &tensor, const fe::graph::Tensor_attributes &as, const Tensor &offsets) {
    tensor->set_output(true).set_dim(as.get_dim()).set_stride(as.get_stride());
    if (offsets) {
        tensor->set_ragged_offset(offsets);
    }
}

static void write_rows(const Tensor &tensor, const Shape &shape, int64_t heads, int64_t row, const Tensor &offsets) {
    write_as(tensor, rows(shape, "", heads, row, offsets), offsets);
}

static fe::graph::Tensor_attributes row_numbers(const Shape &shape, const Tensor &offsets) {
    const int64_t head = offsets ? 1 : shape.tokens, token = offsets ? shape.heads : 1;
    auto attributes = fe::graph::Tensor_attributes()
                          .set_name("statistics")
                          .set_data_type(fe::DataType_t::FLOAT)
                          .set_dim({shape.sequences(), shape.heads, shape.tokens, 1})
                          .set_stride({shape.heads * shape.tokens, head, token, 1});
    return offsets ? attributes.set_ragged_offset(offsets) : attributes;
}

static Tensor scale(fe::graph::Graph &graph) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_name("scale")
                            .set_dim({1, 1, 1, 1})
                            .set_stride({1, 1, 1, 1})
                            .set_is_pass_by_value(true)
                            .set_data_type(fe::DataType_t::FLOAT));
}

static std::array<Tensor, 3> inputs(fe::graph::Graph &graph, const Shape &shape, const Documents &documents) {
    const auto input = [&](const char *name, int64_t heads, const Tensor &offsets) {
        return graph.tensor(rows(shape, name, heads, shape.row(heads), offsets));
    };
    return {input("q", shape.heads, documents.out), input("k", shape.kv_heads, documents.keys), input("v", shape.kv_heads, documents.keys)};
}

static void add_forward(fe::graph::Graph &graph, const Shape &shape) {
    const Documents documents(graph, shape);
    auto options = fe::graph::SDPA_attributes()
                             .set_name("forward")
                             .set_generate_stats(true)
                             .set_attn_scale(scale(graph))
                             .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                             .set_diagonal_band_right_bound(0);
    documents.add_to(options, shape);
    const auto [q, k, v] = inputs(graph, shape, documents);
    auto [out, statistics] = graph.sdpa(q, k, v, options);
    write_rows(out, shape, shape.heads, shape.heads * shape.width, documents.out);
    write_as(statistics, row_numbers(shape, documents.rows), documents.rows);
    statistics->set_data_type(fe::DataType_t::FLOAT);
}

static void add_backward(fe::graph::Graph &graph, const Shape &shape) {
    const Documents documents(graph, shape);
    auto options = fe::graph::SDPA_backward_attributes()
                             .set_name("backward")
                             .set_attn_scale(scale(graph))
                             .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                             .set_diagonal_band_right_bound(0)
                             .set_deterministic_algorithm(true);
    documents.add_to(options, shape);
    const auto [q, k, v] = inputs(graph, shape, documents);
    const auto output = [&](const char *name) {
        return graph.tensor(rows(shape, name, shape.heads, shape.heads * shape.width, documents.out));
    };
    const Tensor out = output("out"), dout = output("dout"), statistics = graph.tensor(row_numbers(shape, documents.rows));
    auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, statistics, options);
    write_rows(dq, shape, shape.heads, shape.row(shape.heads), documents.out);
    write_rows(dk, shape, shape.kv_heads, shape.row(shape.kv_heads), documents.keys);
    write_rows(dv, shape, shape.kv_heads, shape.row(shape.kv_heads), documents.keys);
}

#define STEP(call)                                                                \
    do {                                                                          \
        fe::error_t error = (call);                                               \
        if (error.is_bad()) {                                                     \
            std::fprintf(stderr, "%s: %s\n", #call, error.get_message().c_str()); \
            return false;                                                         \
        }                                                                         \
    } while (false)

static bool build(const std::shared_ptr<fe::DeviceProperties> &device, const char *word, const Shape &shape, bool is_forward,
                  const std::string &folder) {
    fe::graph::Graph graph;
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_device_properties(device)
        .set_sm_version(90);
    is_forward ? add_forward(graph, shape) : add_backward(graph, shape);
    int64_t workspace_bytes = 0;
    std::string name;
    STEP(graph.validate());
    STEP(graph.build_operation_graph(nullptr));
    STEP(graph.create_execution_plans({fe::HeurMode_t::A}));
    STEP(graph.build_plans(nullptr, fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
    STEP(graph.get_workspace_size(workspace_bytes));
    STEP(graph.get_plan_name(name));
    const char *pass = is_forward ? "forward" : "backward";
    std::printf("%s %s %lld %s\n", word, pass, static_cast<long long>(workspace_bytes), name.c_str());
    if (folder != "-") {
        std::vector<uint8_t> data;
        STEP(graph.serialize(data));
        std::ofstream(folder + "/" + word + "-" + pass + ".plan", std::ios::binary)
            .write(reinterpret_cast<const char *>(data.data()), std::streamsize(data.size()));
    }
    return true;
}

int main(int count, char **words) {
    for (const char *name : {"libcublasLt.so.13", "libcudnn.so.9"}) {
        fe::cudnn_dlhandle = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
        if (fe::cudnn_dlhandle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            return 2;
        }
    }
    if (count < 4) {
        std::fprintf(stderr, "usage: frontend DEVICE.json FOLDER|- SHAPE...\n");
        return 2;
    }
    std::ifstream file(words[1]);
    const std::vector<uint8_t> json((std::istreambuf_iterator<char>(file)), {});
    const auto device = std::make_shared<fe::DeviceProperties>();
    if (fe::error_t error = device->deserialize(json); error.is_bad()) {
        std::fprintf(stderr, "%s: %s\n", words[1], error.get_message().c_str());
        return 2;
    }
    bool is_built = true;
    for (int word = 3; word < count; word++) {
        Shape shape;
        if (std::sscanf(words[word], "%ldx%ldx%ldx%ldx%ld", &shape.batch, &shape.heads, &shape.kv_heads, &shape.tokens, &shape.width) != 5) {
            std::fprintf(stderr, "%s is no shape\n", words[word]);
            return 2;
        }
        shape.is_packed = std::strstr(words[word], "-packed") != nullptr;
        const char *ragged = std::strstr(words[word], "-ragged");
        shape.documents = ragged == nullptr ? 0 : std::atol(ragged + std::strlen("-ragged"));
        is_built = build(device, words[word], shape, true, words[2]) && build(device, words[word], shape, false, words[2]) && is_built;
    }
    return is_built ? 0 : 1;
}
