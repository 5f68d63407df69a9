"""The table in kernels/README.md: figures of the kernels' main loops on Hopper."""
from .budget import shown
from .figures import main_pass, per

TARGET = 90
BEGIN, END = "<!-- sass -->", "<!-- /sass -->"
HEAD = ["| kernel | registers | warps | instructions | of the loop | HMMA | LDSM | LDGSTS | LDS | loads in flight |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]


def row(name, figures):
    main = main_pass(figures)

    def ratio(count):
        return f"{count} ({shown(per(count, main.hmma))} per HMMA)" if main.hmma and count else str(count or "")

    inner = f" + {main.loops} inner loops" if main.loops else ""
    cells = [f"`{name}`", figures.registers, figures.warps, figures.instructions, ratio(main.instructions) + inner,
             main.hmma or "", ratio(main.ldsm), main.ldgsts or "", main.lds or "", main.in_flight or ""]
    return "| " + " | ".join(map(str, cells)) + " |"


def made(budget, order):
    """The table, with kernels in this order."""
    rows = [row(name, budget.figures[TARGET, name]) for name in order if (TARGET, name) in budget.figures]
    return "\n".join([BEGIN, *HEAD, *rows, END])


def found(text):
    """The table that a page has, with its markers."""
    start, end = text.find(BEGIN), text.find(END)
    return text[start:end + len(END)] if 0 <= start < end else None
