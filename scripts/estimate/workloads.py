"""A workload: a preset, a micro-batch, and the form of the states."""
import dataclasses

COMMON = ("train.device=cuda", "train.dtype=bf16", "attention.backend=flash")
# bf16 weights, f32 master, moments and gradients.
PLAIN = ()
# bf16 weights with 16-bit remainders, 8-bit moments, bf16 gradients.
SMALL = ("optim.master=bf16-split", "optim.state_dtype=8bit", "optim.grad_dtype=bf16")


@dataclasses.dataclass(frozen=True)
class Workload:
    title: str
    preset: str
    # Sequences of a micro-batch, their tokens, and micro-batches of a step, over which an update is spread.
    batch: int
    seq: int
    accumulation: int
    states: tuple
    # LLMQ's measurement, in percent of the peak; none if there is no figure.
    aim: int | None = None
    # Settings that a card of 80 GB needs beside recomputed SwiGLU, for a table. Copies are not counted.
    beside: str = ""

    @property
    def settings(self):
        """As the trainer's --set takes them."""
        return [*COMMON, f"batch.micro={self.batch}", f"data.seq={self.seq}", f"batch.accum={self.accumulation}", *self.states]


# By the names that --workload takes. An update of the first is spread over 524,288 tokens, of the others over 65,536: so the
# close reading's 1 and 7 ms come out.
WORKLOADS = {
    "qwen2.5-1.5b": Workload("Qwen2.5-1.5B, 32 x 1,024 tokens", "qwen2.5-1.5b", 32, 1024, 16, PLAIN, 57),
    "qwen2.5-7b": Workload("Qwen2.5-7B, 8 x 1,024 tokens", "qwen2.5-7b", 8, 1024, 8, SMALL, 60,
                           " with a quarter of the states on the host"),
    "llama-3-8b": Workload("Llama-3 8B, 1 x 8,192 tokens", "llama-3-8b", 1, 8192, 8, SMALL,
                           beside=" with two fifths of the states on the host"),
}
