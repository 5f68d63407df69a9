"""Tables of estimates, for people and for pages."""
from . import attention, hopper, step, trees
from .trees import READ_COMMIT

# Times from the close reading of c5abdaf, row by row, and of the whole step in percent of the peak.
CLOSE_READING = {
    "qwen2.5-1.5b": ((376, 103, 15, 62, 78, 1), 640, 49),
    "llama-3-8b": ((490, 41, 85, 355, 41, 7), 1020, 42),
}
# How far an estimate of c5abdaf may be from the close reading, of a row of 10 ms and more. The reading priced all products at one
# rate, so rows with products in them, and the whole, say nothing.
ROW_TOLERANCE = 0.07


def deviations(name, estimated):
    """Estimates that are too far from the close reading, in sentences."""
    rows, *_ = CLOSE_READING[name]
    pairs = [(row, read, estimated.row_ms(row)) for row, read in zip(step.ROWS, rows)
             if read >= 10 and row not in (step.PRODUCTS, step.HEAD)]
    return [f"{name}, {title}: {now:.1f} ms, and {read} by the close reading: more than {100 * ROW_TOLERANCE:.0f} % apart"
            for title, read, now in pairs if abs(now / read - 1) > ROW_TOLERANCE]


def rendered(rows, markdown):
    """Rows of texts, the first of them heads, the first column to the left."""
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|---|" + "---:|" * (len(rows[0]) - 1), *lines[1:]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) if not column else cell.rjust(width)
                               for column, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


def by_row(columns, bounds):
    """A table of steps, by their titles: a row of the close reading's table a line, then the whole. `bounds`: each step with large
    products at the highest and at the lowest of the rates that are published.
    """
    estimated = list(columns.values())
    rows = [["estimated ms (nothing ran)", *columns]]
    rows += [[row, *(f"{each.row_ms(row):.1f}" for each in estimated)] for row in step.ROWS]
    rows += [["the whole", *(f"{each.ms():.0f}" for each in estimated)],
             [f"the whole, large products at {hopper.PRODUCT_FLOPS_HIGH / 1e12:.0f} to {hopper.PRODUCT_FLOPS_LOW / 1e12:.0f} TFLOP/s",
              *(f"{fast.ms():.0f} to {slow.ms():.0f}" for fast, slow in bounds)],
             ["% of 989 TFLOP/s, causal operations", *(f"{each.share():.1f}" for each in estimated)],
             ["% of it as `mfu` counts", *(f"{each.share(each.flops_uncut):.1f}" for each in estimated)],
             ["head's chunk", *(str(each.head_chunk) for each in estimated)],
             ["launches", *(f"{each.launches():.0f}" for each in estimated)]]
    return rows


def with_close_reading(name, rows):
    """The table with a column for the close reading's times."""
    if name not in CLOSE_READING:
        return rows
    read, whole, share = CLOSE_READING[name]
    column = [f"{READ_COMMIT}, as read", *map(str, read), str(whole), "", str(share)]
    column += [""] * (len(rows) - len(column))
    return [[row[0], cell, *row[1:]] for row, cell in zip(rows, column)]


def gains(before, after, name, workload, tuned):
    """The gain of each part, one after the other, and what cuDNN and tuning would add."""
    rows = [["estimated, one after the other", "ms", "gain", "%"]]
    last = trees.estimate(before, name)
    rows.append([before.title, f"{last.ms():.0f}", "", f"{last.share():.1f}"])
    named = [*trees.steps_between(last, trees.estimate(after, name)),
             ("cuDNN's attention, if it is as fast as assumed", trees.estimate(after, name, cudnn=True)),
             (f"`trainer tune`, if it brings {100 * (tuned - 1):.0f} % of products",
              trees.estimate(after, name, cudnn=True, tuned=tuned)),
             ("`--recompute mlp_act`, so that it fits a card of 80 GB" + workload.beside,
              trees.estimate(after, name, trees.RECOMPUTED, cudnn=True, tuned=tuned))]
    for title, now in named:
        rows.append([title, f"{now.ms():.0f}", f"{last.ms() - now.ms():.1f}", f"{now.share():.1f}"])
        last = now
    if workload.aim:
        rows.append(["LLMQ, measured by its authors", "", "", str(workload.aim)])
    return rows


def tiles(compared, name):
    """What an iteration of a warp of flash attention keeps busy, in clocks of a multiprocessor, tree by tree."""
    names = ("issue", "shared memory", "tensor cores")
    rows = [["clocks of a warp's iteration (heads of 128)", "stay x go by", "warps", *names, "all"]]
    for tree in compared:
        passes = {call.kernel: call for call in tree.listings[name, ()].calls if call.kernel and attention.pass_of(call.kernel)}
        for kernel, call in passes.items():
            shape = attention.shape_of(tree.kernels[kernel], call)
            rows.append([f"{kernel}, {tree.title}", f"{shape.rows} x {shape.passing}", str(shape.blocks * shape.warps),
                         *(f"{shape.busy[name]:.0f}" for name in names), f"{shape.clocks(shape.blocks):.0f}"])
    return rows
