"""The time of each call of a micro-batch, with its share of those made once a step, in the rows of the close reading's table."""
import dataclasses

from . import attention, hopper, products
from .clock import Launch, kernel_seconds
from .loops import loads_and_bytes

PRODUCTS, HEAD, FORWARD, BACKWARD, OTHERS, UPDATE = ROWS = (
    "block products", "head, cross-entropy", "attention forward", "attention backward",
    "SwiGLU, norms, rotary, bias, row sums, embedding", "AdamW and norm, amortised")


def row_of(call):
    """Where a call stands in the table."""
    if call.phase == "optimizer":
        return UPDATE
    if call.layer == "head":
        return HEAD
    if call.product:
        return PRODUCTS
    if call.kernel and attention.pass_of(call.kernel):
        return FORWARD if call.operation == "flash_attention" else BACKWARD
    return OTHERS


def seconds(call, kernels, tuned=1.0):
    """The time of a call. `tuned`: by how much the library's products are faster than is assumed."""
    if call.product:
        return products.seconds(call.product, call.bytes, tuned)
    if not call.kernel:
        return call.bytes / hopper.BYTES_A_SECOND
    counted = kernels[call.kernel]
    if attention.pass_of(call.kernel):
        return attention.seconds(counted, call)
    loads, moved = loads_and_bytes(call, counted)
    return kernel_seconds(counted, Launch(call.kernel, call.blocks, call.threads, moved, loads, call.shared_bytes))


@dataclasses.dataclass(frozen=True)
class Timed:
    """A call in its row, its time, and how often a micro-batch makes it."""
    row: str
    source: str | None
    seconds: float
    times: float
    in_graph: bool

    def all_seconds(self):
        """With the gap to the next call."""
        return self.times * (self.seconds + (hopper.GRAPH_GAP_S if self.in_graph else hopper.GAP_S))


@dataclasses.dataclass(frozen=True)
class Step:
    timed: tuple
    head_chunk: int
    # Model operations of a micro-batch: those of products and attention, forward and backward, of attention those below the
    # diagonal. Recompute is not counted. It is by this convention that 640 ms are 49 % and 1,020 ms 42 %.
    flops: float
    # The same with all of attention's square, as `mfu` in metrics.jsonl counts (PaLM, Megatron-LM, torchtitan).
    flops_uncut: float

    def launches(self):
        return sum(each.times for each in self.timed)

    def row_ms(self, row):
        return 1e3 * sum(each.all_seconds() for each in self.timed if each.row == row)

    def ms(self):
        """Never less than the host takes to launch it, unless by graphs."""
        launched = sum(each.times for each in self.timed if not each.in_graph)
        return max(sum(map(self.row_ms, ROWS)), 1e3 * launched * hopper.HOST_LAUNCH_S)

    def share(self, flops=None):
        """Of the peak, in percent; by the causal count of operations unless another is given."""
        return 100 * (flops or self.flops) / (self.ms() / 1e3) / hopper.PEAK_FLOPS


def step_of(listing, kernels, cudnn=False, tuned=1.0):
    """A listed step, on kernels as they are counted."""
    timed = [Timed(row_of(call), call.source or "", seconds(call, kernels, tuned), call.times, call.in_graph)
             for call in listing.calls if not (cudnn and call.operation.startswith("flash_"))]
    of_products = sum(call.flops * call.times for call in listing.calls if call.product and call.phase != "recompute")
    forwards = [call for call in listing.calls if call.kernel and call.kernel.startswith("flash_forward") and call.phase != "recompute"]
    if cudnn:
        timed += [each for call in forwards for each in by_cudnn(call)]
    # Backward is twice forward.
    causal = 3 * sum(attention.flops_forward(call) * call.times for call in forwards)
    return Step(tuple(timed), listing.head_chunk, of_products + causal, of_products + 2 * causal)


def by_cudnn(call):
    """Both passes of an attention, in place of our own kernels."""
    found = attention.cudnn_seconds(call.numbers[0], attention.flops_forward(call))
    return [Timed(row, "flash_attention", each, call.times, call.in_graph) for row, each in zip((FORWARD, BACKWARD), found)]
