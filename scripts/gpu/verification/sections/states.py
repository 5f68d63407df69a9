"""Every form of the optimizer's states trains, and the exact ones give the same bits."""
from ..case import kernels
from ..outcome import require

CASES = {"every form": 40}

STEPS, LAST = 40, 10
# In mean loss over the last steps, relative to f32 states. On a CPU the furthest form is 0.04 % away.
NEAR = 0.005


def forms():
    """Moments, master, gradients; f32 weights need no master."""
    states = ("f32", "bf16", "8bit")
    return [("f32", state, None, grad) for state in states for grad in ("f32", "bf16")] + \
        [("bf16", state, master, grad) for state in states for master in ("f32", "bf16-split", "bf16+8", "none") for grad in ("f32", "bf16")]


def arguments(form):
    dtype, state, master, grad = form
    chosen = ["--dtype", dtype, "--state-dtype", state, "--grad-dtype", grad, *(["--master", master] if master else [])]
    # The preset's learning rate knows the text by heart; at this one the loss still measures something.
    return ["--config", "tiny", "--lr", "1e-3", "--micro-batch", 4, "--steps", STEPS, *chosen]


def sources(_case):
    return (*kernels("adamw"), "kernels/states.cuh", "kernels/split.cuh", "kernels/quantise_map.cuh")


def run(place, found, _case):
    runs = dict(zip(forms(), place.train_all([arguments(form) for form in forms()])))
    base = runs["f32", "f32", None, "f32"].metrics.mean_loss(LAST)
    rows = found.table("Optimizer states", "weights", "moments", "master", "gradients", "bytes a parameter", "loss", "against f32")
    for form, trained in runs.items():
        loss, size = trained.metrics.mean_loss(LAST), trained.plan["bytes_per_parameter"]
        rows.append([*(part or "-" for part in form), f"{size:.2f}", f"{loss:.4f}", f"{100 * (loss / base - 1):+.2f} %"])
    found.figures.update(forms=len(runs), furthest=max(abs(trained.metrics.mean_loss(LAST) / base - 1) for trained in runs.values()))
    judge(runs, base)


def judge(runs, base):
    first = runs["f32", "f32", None, "f32"].metrics.steps[0]["loss"]
    require(base < 0.9 * first, f"nothing was learned: losses from {first} to {base}")
    for form, trained in runs.items():
        loss = trained.metrics.mean_loss(LAST)
        require(abs(loss / base - 1) < NEAR, f"{form}: a loss of {loss:.4f}, {base:.4f} with f32 states")
    for (dtype, state, master, grad), trained in runs.items():
        if master == "f32":
            bits, size = trained.metrics.bits(), trained.plan["bytes_per_parameter"]
            split, byte, none = (runs[dtype, state, other, grad] for other in ("bf16-split", "bf16+8", "none"))
            sizes = [trained.plan["bytes_per_parameter"] for trained in (none, byte, split)]
            require(sizes[0] < sizes[1] < sizes[2] < size, f"{state}, {grad}: masters do not differ in size")
            require(split.metrics.bits() == bits, f"{state} moments, {grad} gradients: bf16-split has other bits than an f32 master")
            require(byte.metrics.bits() not in (bits, none.metrics.bits()), f"{state} moments, {grad} gradients: bf16+8 has another master's bits")
            require(none.metrics.bits() != bits, f"{state} moments, {grad} gradients: no master has the bits of an f32 master")
