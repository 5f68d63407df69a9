"""What a micro-batch launches, in the order of the stages, and what that takes, in the rows of the close reading's table."""
import dataclasses

from . import attention, hopper, launches
from .clock import kernel_seconds, product, product_seconds
from .launches import ceil

PRODUCTS, HEAD, FORWARD, BACKWARD, OTHERS, UPDATE = ROWS = (
    "block products", "head, cross-entropy", "attention forward", "attention backward",
    "SwiGLU, norms, rotary, bias, row sums, embedding", "AdamW and norm, amortised")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run chooses, beside the code."""
    head_chunk: int = 512
    graphs: bool = False
    cudnn: bool = False
    # By how much the library's products are faster than its first choice.
    tuned: float = 1.0
    # `--recompute mlp_act`: SwiGLU runs once more, and its output is not kept.
    recomputes_act: bool = False


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
        widths = [model.q, model.kv, model.kv]
        return [sum(widths)] if launches.has_one_product_of_qkv(self.code) else widths

    def up_widths(self):
        """Gate and up came into one product together with queries, keys and values."""
        ffn = self.workload.model.ffn
        return [2 * ffn] if launches.has_one_product_of_qkv(self.code) else [ffn, ffn]

    def attention(self):
        workload, model = self.workload, self.workload.model
        if self.settings.cudnn:
            forward, backward = attention.cudnn_seconds(workload)
            self.add(FORWARD, forward, model.layers)
            self.add(BACKWARD, backward, model.layers)
            return
        heads, group = workload.batch * model.heads, model.heads // model.kv_heads

        def add(row, of, heads, *members):
            seconds = attention.seconds(self.code[of.kernel], of, model.head_dim, workload.seq, heads, *members)
            self.add(row, seconds, model.layers)

        add(FORWARD, attention.FORWARD, heads)
        add(BACKWARD, attention.QUERIES, heads)
        parts = launches.key_parts(self.code, workload)
        add(BACKWARD, launches.key_pass(self.code), heads // group * parts, ceil(group, parts))
        self.launch(OTHERS, launches.beside_attention(self.code, workload), model.layers)

    def block_others(self):
        model, tokens, g = self.workload.model, self.workload.tokens, self.workload.states.gradient_bytes
        norms = launches.norm(tokens, model.hidden) + launches.norm_backward(self.code, tokens, model.hidden, g)
        swiglu = launches.swiglu(model, tokens)
        swiglu += swiglu[:1] if self.settings.recomputes_act else []
        self.launch(OTHERS, 2 * norms + swiglu + launches.qkv(self.code, model, tokens, g), model.layers)
        # A row of the table is read or changed for each token; looking for a token's others is left out.
        self.launch(OTHERS, [launches.by_rows("embedding_bf16", tokens, model.hidden, 2)])
        self.add(OTHERS, tokens * model.hidden * (2 + 2 * g) / hopper.BYTES_A_SECOND)

    def head(self):
        model, g, chunk = self.workload.model, self.workload.states.gradient_bytes, self.settings.head_chunk
        chunks, h, vocab = ceil(self.workload.tokens, chunk), model.hidden, model.vocab
        products = [product(chunk, vocab, h), product(vocab, h, chunk, g, added=True), product(chunk, h, vocab)]
        self.multiply(HEAD, products, chunks)
        # A row is read twice, the second time from cache.
        self.launch(HEAD, [launches.by_rows("cross_entropy_bf16", chunk, vocab, 2, 2)], chunks)
        self.launch(HEAD, launches.norm(chunk, h) + launches.norm_backward(self.code, chunk, h, g), chunks)

    def update(self):
        """Of all parameters, once a step, and the norm of their gradients."""
        model, states = self.workload.model, self.workload.states
        share = 1 / self.workload.accumulation
        self.launch(UPDATE, [launches.update(self.code, model, states)], share)
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
