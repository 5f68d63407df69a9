// Attention of our layouts and settings, built by NVIDIA's frontend for the device that a file describes:
//
//   frontend DEVICE.json FOLDER|- 2x8x2x512x64 ...
//
// A shape is batch x heads x key-value heads x tokens x head width, with -packed behind it where queries, keys and values are
// columns of one tensor. Prints `shape pass workspace plan`, and writes the plans to
// the folder.
#include <cudnn_frontend.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iterator>

namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}
namespace fe = cudnn_frontend;

struct Shape {
    int64_t batch, heads, kv_heads, tokens, width;
    bool is_packed;

    // Elements from a token's row of so many heads to the next.
    int64_t row(int64_t of_heads) const { return (is_packed ? heads + 2 * kv_heads : of_heads) * width; }
};

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// `[b, s, heads, d]` in memory, in rows of so many elements.
static fe::graph::Tensor_attributes rows(const Shape &shape, const char *name, int64_t heads, int64_t row) {
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_dim({shape.batch, heads, shape.tokens, shape.width})
        .set_stride({shape.tokens * row, shape.width, row, 1});
}

static void write_rows(const Tensor &tensor, const Shape &shape, int64_t heads, int64_t row) {
    const fe::graph::Tensor_attributes as = rows(shape, "", heads, row);
    tensor->set_output(true).set_dim(as.get_dim()).set_stride(as.get_stride());
}

static fe::graph::Tensor_attributes row_numbers(const Shape &shape) {
    return fe::graph::Tensor_attributes()
        .set_name("statistics")
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({shape.batch, shape.heads, shape.tokens, 1})
        .set_stride({shape.heads * shape.tokens, shape.tokens, 1, 1});
}

static Tensor scale(fe::graph::Graph &graph) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_name("scale")
                            .set_dim({1, 1, 1, 1})
                            .set_stride({1, 1, 1, 1})
                            .set_is_pass_by_value(true)
                            .set_data_type(fe::DataType_t::FLOAT));
}

static std::array<Tensor, 3> inputs(fe::graph::Graph &graph, const Shape &shape) {
    const auto input = [&](const char *name, int64_t heads) { return graph.tensor(rows(shape, name, heads, shape.row(heads))); };
    return {input("q", shape.heads), input("k", shape.kv_heads), input("v", shape.kv_heads)};
}

static void add_forward(fe::graph::Graph &graph, const Shape &shape) {
    const auto options = fe::graph::SDPA_attributes()
                             .set_name("forward")
                             .set_generate_stats(true)
                             .set_attn_scale(scale(graph))
                             .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                             .set_diagonal_band_right_bound(0);
    const auto [q, k, v] = inputs(graph, shape);
    auto [out, statistics] = graph.sdpa(q, k, v, options);
    write_rows(out, shape, shape.heads, shape.heads * shape.width);
    const fe::graph::Tensor_attributes as = row_numbers(shape);
    statistics->set_output(true).set_data_type(fe::DataType_t::FLOAT).set_dim(as.get_dim()).set_stride(as.get_stride());
}

static void add_backward(fe::graph::Graph &graph, const Shape &shape) {
    const auto options = fe::graph::SDPA_backward_attributes()
                             .set_name("backward")
                             .set_attn_scale(scale(graph))
                             .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                             .set_diagonal_band_right_bound(0)
                             .set_deterministic_algorithm(true);
    const auto [q, k, v] = inputs(graph, shape);
    const int64_t row = shape.heads * shape.width;
    const Tensor out = graph.tensor(rows(shape, "out", shape.heads, row)), dout = graph.tensor(rows(shape, "dout", shape.heads, row));
    auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, graph.tensor(row_numbers(shape)), options);
    write_rows(dq, shape, shape.heads, shape.row(shape.heads));
    write_rows(dk, shape, shape.kv_heads, shape.row(shape.kv_heads));
    write_rows(dv, shape, shape.kv_heads, shape.row(shape.kv_heads));
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
        is_built = build(device, words[word], shape, true, words[2]) && build(device, words[word], shape, false, words[2]) && is_built;
    }
    return is_built ? 0 : 1;
}
