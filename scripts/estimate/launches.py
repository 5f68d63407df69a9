"""How our own kernels are launched: blocks, threads and bytes, as crates/kernels/src/cuda/ has them.

Which kernels a tree has says which generation of the launch code it is: one without `rms_norm_dweight` makes the weight's gradient
in the pass that makes dx, and one with `split_qkv` has queries, keys and values in one product.
"""
from . import attention
from .clock import Launch

# Kernels whose machine code is counted, by source. No tree has all of them.
SOURCES = {
    "flash_attention": ["flash_forward_128_bf16", "flash_backward_queries_128_bf16", "flash_backward_keys_128_bf16", "flash_row_sums_bf16",
                        "flash_add_parts_bf16"],
    "rms_norm": ["rms_norm_bf16", "rms_norm_backward_bf16", "rms_norm_dweight_bf16", "rms_norm_backward_wide_bf16"],
    "columns": ["add_parts_f32", "add_parts_bf16"],
    "elementwise": ["add_bias_bf16", "bias_backward_bf16"],
    "swiglu": ["swiglu_bf16", "swiglu_backward_bf16"],
    "rotary": ["rotary_bf16"],
    "qkv": ["split_qkv_bf16", "join_qkv_bf16"],
    "cross_entropy": ["cross_entropy_bf16"],
    "embedding": ["embedding_bf16"],
    "adamw": ["adamw_master_f32_f32", "adamw_split_8bit_bf16"],
}

PACK = 8
# `extent.rs`: threads of a flat tensor's block, and most of a row's; packs of columns of a block, and threads that share their rows.
FLAT_THREADS, ROW_THREADS_MAX = 256, 512
COLUMN_PACKS, COLUMN_LANES = 4, 128
# `columns.rs` at c5abdaf, and `elementwise.rs` since: rows of a part, parts, and blocks that are enough.
PART_ROWS_MIN, PARTS_MAX, BLOCKS_MIN = 256, 256, 1024
# `norm_backward.rs`: rows of a block, blocks, packs that a thread holds of rows wider than a pack a thread.
NORM_ROWS_MIN, NORM_PARTS_MAX, HELD = 16, 1024, 4
# `scratch.rs` and `flash.rs` since: keys of a block that makes dk and dv, blocks that are enough, lanes of a row of 128.
BLOCK_KEYS, KEY_BLOCKS_ENOUGH, SUM_THREADS, SUM_LANES = 64, 512, 128, 16
# `adamw.rs`: elements of a block, and turns of a warp; later blocks have twice as many of both, which comes to the same.
UPDATE_BLOCK, UPDATE_TURNS = 8192, 4


def ceil(value, of):
    return -(-value // of)


def makes_norms_in_one_pass(code):
    return "rms_norm_dweight_bf16" not in code


def has_one_product_of_qkv(code):
    return "split_qkv_bf16" in code


def key_pass(code):
    """How dk and dv are made: parts of them came together with pairs of warps."""
    return attention.PAIRED_KEYS if "flash_add_parts_bf16" in code else attention.KEYS


def key_parts(code, workload):
    """Parts of the query heads of a key-value head of which blocks make dk and dv apart: since there are pairs, as few as are
    enough blocks."""
    if key_pass(code) is attention.KEYS:
        return 1
    model = workload.model
    blocks = workload.batch * model.kv_heads * ceil(workload.seq, BLOCK_KEYS)
    return min(ceil(KEY_BLOCKS_ENOUGH, blocks), model.heads // model.kv_heads)


def beside_attention(code, workload):
    """What our own backward pass launches beside its two main kernels: sums of rows, and where there are parts of dk and dv, theirs."""
    model, rows, parts = workload.model, workload.tokens * workload.model.heads, key_parts(code, workload)
    moved = 2 * 2 * rows * model.head_dim + 4 * rows
    if key_pass(code) is attention.KEYS:
        # A warp a row.
        return [Launch("flash_row_sums_bf16", ceil(rows, SUM_THREADS // 32), SUM_THREADS, moved)]
    sums = Launch("flash_row_sums_bf16", workload.tokens * ceil(model.heads, SUM_THREADS // SUM_LANES), SUM_THREADS, moved)
    if parts == 1:
        return [sums]
    elements = 2 * workload.tokens * model.kv
    added = Launch("flash_add_parts_bf16", ceil(elements, FLAT_THREADS * PACK), FLAT_THREADS, (4 * parts + 2) * elements, 2 * parts)
    return [sums, added]


def flat(kernel, elements, tensors):
    """A pack a thread of a tensor of bf16, with so many tensors read or written."""
    return Launch(kernel, ceil(elements, FLAT_THREADS * PACK), FLAT_THREADS, 2 * tensors * elements)


def row_threads(width):
    return min(32 * ceil(ceil(width, PACK), 32), ROW_THREADS_MAX)


def by_rows(kernel, rows, width, tensors, loads=0):
    """A block a row of bf16, a pack a thread as far as threads go. `loads`: wide loads for each pack."""
    threads = row_threads(width)
    return Launch(kernel, rows, threads, 2 * tensors * rows * width, loads * ceil(width, threads * PACK) or None)


def norm(rows, width):
    return [by_rows("rms_norm_bf16", rows, width, 2, 3)]


def norm_backward(code, rows, width, gradient_bytes):
    """dx is added to what is there."""
    if not makes_norms_in_one_pass(code):
        return [by_rows("rms_norm_backward_bf16", rows, width, 4, 7),
                *column_sums(code, "rms_norm_dweight_bf16", rows, width, 2, gradient_bytes)]
    # A block takes rows one after the other.
    is_narrow = width <= PACK * ROW_THREADS_MAX
    kernel = "rms_norm_backward_bf16" if is_narrow else "rms_norm_backward_wide_bf16"
    threads = row_threads(width) if is_narrow else 32 * ceil(ceil(width, PACK * HELD), 32)
    part_rows = max(ceil(rows, NORM_PARTS_MAX), NORM_ROWS_MIN)
    parts = ceil(rows, part_rows)
    written = 4 * parts * width
    return [Launch(kernel, parts, threads, 2 * 4 * rows * width + written, code[kernel].loads * part_rows),
            add_parts(code, parts, width, gradient_bytes)]


def column_sums(code, kernel, rows, width, tensors, gradient_bytes):
    """Sums over the rows of so many matrices of bf16, in parts, and the parts' sum."""
    columns = ceil(width, COLUMN_PACKS * PACK)
    parts_max = min(ceil(BLOCKS_MIN, columns), PARTS_MAX) if makes_norms_in_one_pass(code) else PARTS_MAX
    part_rows = max(ceil(rows, parts_max), PART_ROWS_MIN)
    parts = ceil(rows, part_rows)
    read, written = 2 * tensors * rows * width, 4 * parts * width
    return [Launch(kernel, columns * parts, COLUMN_PACKS * COLUMN_LANES, read + written, tensors * ceil(part_rows, COLUMN_LANES)),
            add_parts(code, parts, width, gradient_bytes)]


def add_parts(code, parts, width, gradient_bytes):
    """A pack of f32 is two loads. At first a thread went through all parts of its columns; since, lanes share them."""
    kernel = "add_parts_f32" if gradient_bytes == 4 else "add_parts_bf16"
    moved = 4 * parts * width + 2 * gradient_bytes * width
    if not makes_norms_in_one_pass(code):
        return Launch(kernel, ceil(width, FLAT_THREADS * PACK), FLAT_THREADS, moved, 2 * parts)
    lanes = min(max(1 << (parts - 1).bit_length(), 32 // COLUMN_PACKS), COLUMN_LANES)
    return Launch(kernel, ceil(width, COLUMN_PACKS * PACK), COLUMN_PACKS * lanes, moved, 2 * ceil(parts, lanes))


def qkv(code, model, tokens, gradient_bytes):
    """What is done to queries, keys and values beside their products, forward and backward."""
    widths = [model.q, model.kv, model.kv]
    if has_one_product_of_qkv(code):
        # Taken apart and turned in one pass, biases in the product; their gradients joined and turned back.
        width = sum(widths)
        turned = (model.q + model.kv) // 2 + model.kv
        moved = [Launch(kernel, tokens, row_threads(turned), 2 * 2 * tokens * width) for kernel in ("split_qkv_bf16", "join_qkv_bf16")]
        sums = column_sums(code, "bias_backward_bf16", tokens, width, 1, gradient_bytes) if model.qkv_bias else []
        return moved + sums
    # Forward, and the inverse backward; in place, a pack of pairs a thread.
    found = 2 * [Launch("rotary_bf16", tokens, row_threads(width // 2), 2 * 2 * tokens * width) for width in widths[:2]]
    for width in widths if model.qkv_bias else ():
        found += [by_rows("add_bias_bf16", tokens, width, 2)]
        found += column_sums(code, "bias_backward_bf16", tokens, width, 1, gradient_bytes)
    return found


def swiglu(model, tokens):
    return [flat("swiglu_bf16", tokens * model.ffn, 3), flat("swiglu_backward_bf16", tokens * model.ffn, 5)]


def update(code, model, states):
    """Of all parameters."""
    blocks = ceil(model.parameters, UPDATE_BLOCK)
    return Launch(states.kernel, blocks, FLAT_THREADS, states.update_bytes * model.parameters, code[states.kernel].loads * UPDATE_TURNS)
