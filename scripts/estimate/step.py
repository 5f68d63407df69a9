"""What a micro-batch launches, in the order of the stages, and what that takes, in the rows of the close reading's table.

Which kernels there are says which generation of the launch code is described: a tree that has no `rms_norm_dweight` makes the
weight's gradient in the pass that makes dx.
"""
import dataclasses

from . import attention, hopper
from .clock import Launch, kernel_seconds, product, product_seconds

PRODUCTS, HEAD, FORWARD, BACKWARD, OTHERS, UPDATE = ROWS = (
    "block products", "head, cross-entropy", "attention forward", "attention backward",
    "SwiGLU, norms, rotary, bias, row sums, embedding", "AdamW and norm, amortised")

# Kernels whose machine code is counted, by source.
SOURCES = {
    "flash_attention": ["flash_forward_128_bf16", "flash_backward_queries_128_bf16", "flash_backward_keys_128_bf16", "flash_row_sums_bf16"],
    "rms_norm": ["rms_norm_bf16", "rms_norm_backward_bf16", "rms_norm_dweight_bf16"],
    "columns": ["add_parts_f32", "add_parts_bf16"],
    "elementwise": ["add_bias_bf16", "bias_backward_bf16"],
    "swiglu": ["swiglu_bf16", "swiglu_backward_bf16"],
    "rotary": ["rotary_bf16"],
    "cross_entropy": ["cross_entropy_bf16"],
    "embedding": ["embedding_bf16"],
    "adamw": ["adamw_master_f32_f32", "adamw_split_8bit_bf16"],
}

PACK = 8
FLAT_THREADS, ROW_THREADS_MAX = 256, 512
# `columns.rs` and `columns.cuh`: packs of columns of a block, threads that share their rows, rows of a part, parts.
COLUMN_PACKS, ROW_LANES, PART_ROWS, PARTS_MAX = 4, 128, 256, 256
# `adamw.rs`: elements of a block, and of a warp at a time.
UPDATE_BLOCK, UPDATE_ROUNDS = 8192, 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run chooses, beside the code."""
    head_chunk: int = 512
    graphs: bool = False
    cudnn: bool = False
    # By how much the library's products are faster than its first choice.
    tuned: float = 1.0


def ceil(value, of):
    return -(-value // of)


def flat(kernel, elements, tensors):
    """A pack a thread of a tensor of bf16, with so many tensors read or written."""
    return Launch(kernel, ceil(elements, FLAT_THREADS * PACK), FLAT_THREADS, 2 * tensors * elements)


def row_threads(width):
    return min(max(32 * ceil(ceil(width, PACK), 32), 32), ROW_THREADS_MAX)


def by_rows(kernel, rows, width, tensors, loads=0, extra_bytes=0):
    """A block a row of bf16. `loads`: wide loads for each pack, where a row takes more than one a thread."""
    threads = row_threads(width)
    times = ceil(width, threads * PACK)
    return Launch(kernel, rows, threads, 2 * tensors * rows * width + extra_bytes, loads * times or None)


def column_parts(rows):
    """Rows of a part, and parts."""
    part_rows = max(ceil(rows, PARTS_MAX), PART_ROWS)
    return part_rows, ceil(rows, part_rows)


def by_columns(kernel, rows, width, tensors, gradient_bytes):
    """Sums over rows in parts, and their sum."""
    part_rows, parts = column_parts(rows)
    blocks = ceil(width, COLUMN_PACKS * PACK) * parts
    written = 4 * parts * width
    return [Launch(kernel, blocks, COLUMN_PACKS * ROW_LANES, 2 * tensors * rows * width + written,
                   tensors * ceil(part_rows, ROW_LANES)),
            add_parts(parts, width, gradient_bytes)]


def add_parts(parts, width, gradient_bytes):
    kernel = "add_parts_f32" if gradient_bytes == 4 else "add_parts_bf16"
    # Two loads for a pack of f32.
    return Launch(kernel, ceil(width, FLAT_THREADS * PACK), FLAT_THREADS, 4 * parts * width + 2 * gradient_bytes * width, 2 * parts)


class Step:
    """Products and launches of a micro-batch, by row."""

    def __init__(self, workload, code, settings):
        self.workload, self.code, self.settings = workload, code, settings
        self.launched = {row: [] for row in ROWS}
        self.attention()
        self.block_products()
        self.block_others()
        self.head()
        self.update()

    def add(self, row, seconds, times=1):
        self.launched[row].append((seconds, times))

    def launch(self, row, launches, times=1):
        for each in launches:
            self.add(row, kernel_seconds(self.code[each.kernel], each), times)

    def multiply(self, row, products, times=1):
        for each in products:
            self.add(row, product_seconds(each, self.settings.tuned), times)

    # What is launched.

    def block_products(self):
        """Forward, weight gradients (added to what is there) and data gradients of a layer."""
        model, tokens, g = self.workload.model, self.workload.tokens, self.workload.states.gradient_bytes
        h, f, q, kv = model.hidden, model.ffn, model.q, model.kv
        forward = [product(tokens, width, h) for width in self.qkv_widths() + self.up_widths()]
        forward += [product(tokens, h, q, added=True), product(tokens, h, f, added=True)]
        weights = [product(width, h, tokens, g, added=True) for width in self.qkv_widths() + self.up_widths()]
        weights += [product(h, q, tokens, g, added=True), product(h, f, tokens, g, added=True)]
        data = [product(tokens, q, h), product(tokens, f, h)]
        for widths in (self.qkv_widths(), self.up_widths()):
            data += [product(tokens, h, width, added=index > 0) for index, width in enumerate(widths)]
        self.multiply(PRODUCTS, forward + weights + data, model.layers)

    def qkv_widths(self):
        model = self.workload.model
        return [model.q, model.kv, model.kv]

    def up_widths(self):
        return [self.workload.model.ffn] * 2

    def attention(self):
        workload, model = self.workload, self.workload.model
        if self.settings.cudnn:
            forward, backward = attention.cudnn_seconds(workload)
            self.add(FORWARD, forward, model.layers)
            self.add(BACKWARD, backward, model.layers)
            return
        heads, group = workload.batch * model.heads, model.heads // model.kv_heads

        def seconds(kernel, heads, *more):
            return attention.seconds(self.code[kernel], 128, heads, workload.seq, model.head_dim, *more)

        self.add(FORWARD, seconds("flash_forward_128_bf16", heads, 2), model.layers)
        self.add(BACKWARD, seconds("flash_backward_queries_128_bf16", heads, 3), model.layers)
        self.add(BACKWARD, seconds("flash_backward_keys_128_bf16", heads // group, 4, group, False), model.layers)
        rows = workload.tokens * model.heads
        sums = Launch("flash_row_sums_bf16", ceil(rows, 4), 128, 2 * 2 * rows * model.head_dim + 4 * rows)
        self.launch(OTHERS, [sums], model.layers)

    def block_others(self):
        model, tokens, g = self.workload.model, self.workload.tokens, self.workload.states.gradient_bytes
        launches = 2 * (self.norm(tokens) + self.norm_backward(tokens))
        launches += [flat("swiglu_bf16", tokens * model.ffn, 3), flat("swiglu_backward_bf16", tokens * model.ffn, 5)]
        # Forward, and the inverse backward; in place, a pack of pairs a thread.
        launches += 2 * [Launch("rotary_bf16", tokens, row_threads(width // 2), 4 * tokens * width) for width in (model.q, model.kv)]
        if model.qkv_bias:
            for width in (model.q, model.kv, model.kv):
                launches += [by_rows("add_bias_bf16", tokens, width, 2)]
                launches += by_columns("bias_backward_bf16", tokens, width, 1, g)
        self.launch(OTHERS, launches, model.layers)
        # A row of the table is read or changed for each token; looking for a token's others is left out.
        self.launch(OTHERS, [by_rows("embedding_bf16", tokens, model.hidden, 2)])
        self.add(OTHERS, tokens * model.hidden * (2 + 2 * g) / hopper.BYTES_A_SECOND)

    def norm(self, rows):
        return [by_rows("rms_norm_bf16", rows, self.workload.model.hidden, 2, 3)]

    def norm_backward(self, rows):
        """dx is added to what is there, and the weight's gradient has a pass of its own."""
        width, g = self.workload.model.hidden, self.workload.states.gradient_bytes
        return [by_rows("rms_norm_backward_bf16", rows, width, 4, 7), *by_columns("rms_norm_dweight_bf16", rows, width, 2, g)]

    def head(self):
        model, g, chunk = self.workload.model, self.workload.states.gradient_bytes, self.settings.head_chunk
        chunks, h, vocab = ceil(self.workload.tokens, chunk), model.hidden, model.vocab
        products = [product(chunk, vocab, h), product(vocab, h, chunk, g, added=True), product(chunk, h, vocab)]
        self.multiply(HEAD, products, chunks)
        # A row is read twice, the second time from cache.
        self.launch(HEAD, [by_rows("cross_entropy_bf16", chunk, vocab, 2, 2)], chunks)
        self.launch(HEAD, self.norm(chunk) + self.norm_backward(chunk), chunks)

    def update(self):
        """Of all parameters, once a step, and the norm of their gradients."""
        model, states = self.workload.model, self.workload.states
        blocks = ceil(model.parameters, UPDATE_BLOCK)
        counted = self.code[states.kernel]
        launch = Launch(states.kernel, blocks, FLAT_THREADS, states.update_bytes * model.parameters, counted.loads * UPDATE_ROUNDS)
        share = 1 / self.workload.accumulation
        self.launch(UPDATE, [launch], share)
        self.add(UPDATE, states.gradient_bytes * model.parameters / hopper.BYTES_A_SECOND, share)

    # What it comes to.

    def launches(self):
        return sum(times for row in self.launched.values() for _, times in row)

    def gap(self):
        return hopper.GRAPH_GAP_S if self.settings.graphs else hopper.GAP_S

    def row_ms(self, row):
        return 1e3 * sum((seconds + self.gap()) * times for seconds, times in self.launched[row])

    def ms(self):
        """Of a micro-batch and its share of the update: never less than the host takes to launch it, unless by graphs."""
        device = sum(map(self.row_ms, ROWS))
        host = 0.0 if self.settings.graphs else 1e3 * self.launches() * hopper.HOST_LAUNCH_S
        return max(device, host)

    def share(self, flops=None):
        """Of the peak, in percent; by the causal count of operations unless another is given."""
        return 100 * (flops or self.workload.flops) / (self.ms() / 1e3) / hopper.PEAK_FLOPS
