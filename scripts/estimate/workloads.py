"""What is trained: the shapes of a model, a micro-batch, and how many floating-point operations are counted for it."""
import dataclasses
import pathlib
import tomllib

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


@dataclasses.dataclass(frozen=True)
class Model:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool

    @property
    def q(self):
        return self.heads * self.head_dim

    @property
    def kv(self):
        return self.kv_heads * self.head_dim

    @property
    def block_weights(self):
        """Of the products of a layer."""
        return self.hidden * (2 * self.q + 2 * self.kv) + 3 * self.hidden * self.ffn

    @property
    def product_weights(self):
        return self.layers * self.block_weights + self.hidden * self.vocab

    @property
    def parameters(self):
        """All of them, but for norms and biases, which are a thousandth."""
        return self.product_weights + (0 if self.tied else self.hidden * self.vocab)


def read_model(name, folder=CONFIGS):
    """A model from a preset's file."""
    found = tomllib.loads((folder / f"{name}.toml").read_text())["model"]
    return Model(found["hidden"], found["layers"], found["heads"], found["kv_heads"], found["head_dim"], found["ffn"],
                 found["vocab"], found.get("tie_embeddings", False), found.get("qkv_bias", False))


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes of a parameter that an update reads and writes, of its gradient in memory, and the kernel that does it."""
    update_bytes: int
    gradient_bytes: int
    kernel: str


# bf16 weights, written; f32 master and moments, read and written; f32 gradients, read.
PLAIN = States(2 + 3 * 8 + 4, 4, "adamw_master_f32_f32")
# bf16 weights and 16-bit remainders, read and written; 8-bit moments, read and written; bf16 gradients, read.
SMALL = States(2 * 4 + 2 * 2 + 2, 2, "adamw_split_8bit_bf16")


@dataclasses.dataclass(frozen=True)
class Workload:
    title: str
    model: Model
    states: States
    # Sequences of a micro-batch, and their tokens.
    batch: int
    seq: int
    # Micro-batches of a step, over which an update is spread.
    accumulation: int
    # What LLMQ measures, in percent of the peak; none where there is no figure.
    aim: int | None = None
    # What a card of 80 GB needs beside recomputed SwiGLU, for a table. Copies are not counted.
    beside: str = ""

    @property
    def tokens(self):
        return self.batch * self.seq

    @property
    def flops(self):
        """Model operations of a micro-batch: six for each weight of a product and token, and attention's below the diagonal
        alone. Recompute is not counted, and none is done. It is by this convention that 640 ms are 49 % and 1,020 ms 42 %."""
        attention = 6 * self.model.layers * self.model.q * self.seq
        return self.tokens * (6 * self.model.product_weights + attention)

    @property
    def flops_uncut(self):
        """The same with all of attention's square, as `mfu` in metrics.jsonl counts (PaLM, Megatron-LM, torchtitan)."""
        return self.flops + self.tokens * 6 * self.model.layers * self.model.q * self.seq

    @property
    def attention_flops(self):
        """Of the two products of a layer's attention forward, below the diagonal."""
        return 2 * 2 * self.batch * self.model.q * self.seq * self.seq / 2


def all_workloads():
    """By the names that --workload takes. An update of the first is spread over 524,288 tokens, of the others over 65,536:
    so the close reading's 1 and 7 ms come out."""
    return {
        "qwen2.5-1.5b": Workload("Qwen2.5-1.5B, 32 x 1,024 tokens", read_model("qwen2.5-1.5b"), PLAIN, 32, 1024, 16, 57),
        "qwen2.5-7b": Workload("Qwen2.5-7B, 8 x 1,024 tokens", read_model("qwen2.5-7b"), SMALL, 8, 1024, 8, 60,
                               " with a quarter of the states on the host"),
        "llama-3-8b": Workload("Llama-3 8B, 1 x 8,192 tokens", read_model("llama-3-8b"), SMALL, 1, 8192, 8,
                               beside=" with two fifths of the states on the host"),
    }
