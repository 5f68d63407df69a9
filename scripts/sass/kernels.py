"""The kernels that a step spends its time in, and the blocks that the launch code in crates/kernels/src/cuda/ launches them with:
tests/test_launches.py holds them to it."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Launch:
    threads: int
    # Beside what the kernel declares.
    shared_bytes: int = 0
    # Its work is outside of its loops, which only wider rows come to.
    is_without_loops: bool = dataclasses.field(default=False, compare=False)
    # Its outer loops go over tiles, and the loops within them do the work.
    goes_over_tiles: bool = dataclasses.field(default=False, compare=False)


def flash(width, rows):
    """Threads of `flash/sm80.rs`, and tiles of so many rows of bf16, each with a chunk of padding."""
    return Launch(128, rows * (width // 8 + 1) * 16)


def flash_sm90(kept, staged, stages, groups=2, known=0):
    """Threads of `flash/sm90.rs` and its shared memory: rows that a block keeps and stages of tiles, in bytes, barriers, and what is known of
    a stage's queries."""
    return Launch(128 * (1 + groups), kept + stages * (staged + 2 * 2 * 8 + known) + 16)


# Rows of 4,096 elements and more (of 8,192 for `rotary`, which turns pairs), columns of matrices of 128 rows and more, and flat
# tensors: `extent.rs`. Rows that a thread's registers hold: `extent.rs` too. Rows of 8,192 elements in the backward pass of norms: `norm_backward.rs`.
ROWS, COLUMNS, FLAT, WIDE_ROWS = Launch(512), Launch(4 * 128), Launch(256), Launch(256)
HELD_ROWS = Launch(256, is_without_loops=True)

# Four stages of 128 rows and of 128 columns, each of 32 elements of bf16 and a chunk of padding: `experts.rs`.
GROUPED = Launch(4 * 32, 4 * (128 + 128) * (32 * 2 + 16))
# For Hopper four stages of 128 rows and 256 columns, each of 64 elements, with two barriers each.
GROUPED_SM90 = Launch(12 * 32, 4 * ((128 + 256) * 64 * 2 + 2 * 8), goes_over_tiles=True)

# Keys, scores, rows of 32 value columns, a state and 32 queries; of a chunk of a key head keys, queries, scores and two rows of 16 value
# columns: `gated_delta.rs`.
DELTA_TILE = Launch(8 * 32, 4 * (64 * (132 + 68 + 40) + 128 * 40 + 32 * 132))
DELTA_CHUNK = Launch(8 * 32, 4 * 64 * (2 * 132 + 68 + 2 * 20))

# By source file.
HOT = {
    "flash_attention": {
        "flash_forward_64_bf16": flash(64, 128 + 2 * 64),
        "flash_forward_128_bf16": flash(128, 128 + 2 * 64),
        "flash_backward_queries_64_bf16": flash(64, 2 * 128 + 3 * 64),
        "flash_backward_queries_128_bf16": flash(128, 2 * 128 + 3 * 32),
        "flash_backward_keys_64_bf16": flash(64, 2 * 64 + 4 * 64),
        "flash_backward_keys_128_bf16": flash(128, 2 * 64 + 4 * 32),
        "flash_row_sums_bf16": Launch(4 * 32),
    },
    "flash_forward_sm90": {
        "flash_forward_sm90_64_bf16": flash_sm90(192 * 128, 2 * 112 * 128, 2, groups=3),
        "flash_forward_sm90_128_bf16": flash_sm90(128 * 256, 2 * 128 * 256, 2),
    },
    "flash_backward_sm90": {
        "flash_backward_queries_sm90_64_bf16": flash_sm90(2 * 128 * 128, 2 * 128 * 128, 3),
        "flash_backward_queries_sm90_128_bf16": flash_sm90(2 * 128 * 256, 2 * 128 * 256, 2),
        "flash_backward_keys_sm90_64_bf16": flash_sm90(2 * 128 * 128, 2 * 96 * 128, 3, known=96 * 12 + 16),
        "flash_backward_keys_sm90_128_bf16": flash_sm90(2 * 128 * 256, 2 * 64 * 256, 3, known=64 * 12 + 16),
    },
    "attention": {"attention_softmax_bf16": ROWS, "attention_softmax_backward_bf16": ROWS},
    "rms_norm": {"rms_norm_bf16": HELD_ROWS, "rms_norm_largest_bf16": HELD_ROWS, "rms_norm_codes_bf16": HELD_ROWS, "rms_norm_backward_bf16": ROWS, "rms_norm_backward_wide_bf16": WIDE_ROWS},
    "layer_norm": {"layer_norm_bf16": HELD_ROWS, "layer_norm_largest_bf16": HELD_ROWS, "layer_norm_codes_bf16": HELD_ROWS, "layer_norm_backward_bf16": ROWS},
    "columns": {"add_parts_f32": COLUMNS},
    "elementwise": {"bias_backward_bf16": COLUMNS},
    "gated_delta": {
        "gated_delta_bf16": DELTA_TILE,
        "gated_delta_states_bf16": DELTA_TILE,
        "gated_delta_gradients_bf16": DELTA_CHUNK,
    },
    "dequantise": {"dequantise_bytes_bf16": FLAT, "dequantise_nf4_bf16": FLAT, "dequantise_mxfp4_bf16": FLAT},
    "swiglu": {
        "swiglu_bf16": Launch(128),
        "swiglu_largest_bf16": Launch(128),
        "swiglu_codes_bf16": Launch(128),
        "swiglu_backward_bf16": Launch(128),
        "swiglu_backward_largest_bf16": Launch(128),
    },
    "sigmoid_gate": {"sigmoid_gate_bf16": FLAT, "sigmoid_gate_backward_bf16": FLAT},
    "gelu": {"gelu_largest_bf16": FLAT, "gelu_codes_bf16": FLAT, "gelu_backward_largest_bf16": FLAT},
    "fp8": {
        "abs_max_of_part_bf16": FLAT,
        "abs_max_of_parts": Launch(1024),
        "quantise_e4m3_bf16": FLAT,
        "quantise_counting_e4m3_bf16": FLAT,
        "quantise_counting_e5m2_bf16": FLAT,
        "transpose_codes": FLAT,
        "quantise_transposed_e4m3_bf16": FLAT,
    },
    "grouped_matmul": {
        "grouped_matmul_bf16": GROUPED,
        "grouped_matmul_by_columns_bf16": GROUPED,
        "grouped_gradient_f32_bf16": GROUPED,
        "grouped_gradient_bf16_bf16": GROUPED,
    },
    "grouped_matmul_sm90": {
        "grouped_matmul_sm90_bf16": GROUPED_SM90,
        "grouped_matmul_by_columns_sm90_bf16": GROUPED_SM90,
        "grouped_gradient_sm90_f32_bf16": GROUPED_SM90,
        "grouped_gradient_sm90_bf16_bf16": GROUPED_SM90,
    },
    "experts": {
        "sum_rows_bf16": Launch(128),
        "weighed_swiglu_bf16": Launch(128),
        "weighed_swiglu_backward_bf16": ROWS,
    },
    "rotary": {"rotary_bf16": ROWS},
    "qkv": {"split_qkv_bf16": ROWS, "join_qkv_bf16": ROWS, "join_qkv_largest_bf16": Launch(384)},
    "cross_entropy": {"cross_entropy_bf16": ROWS},
    "embedding": {"embedding_bf16": ROWS, "embedding_backward_f32_bf16": FLAT},
    "norm": {"norm_grains_f32": FLAT},
    "sum_in_order": {"sum_in_order_f32": FLAT, "sum_in_order_bf16": FLAT},
    "adamw": {"adamw_master_f32_f32": FLAT, "adamw_split_8bit_bf16": FLAT},
}
LAUNCHES = {name: launch for kernels in HOT.values() for name, launch in kernels.items()}
