"""Five steps of training against PyTorch's, whose losses, gradients and weights are in the bundle."""
import json
from dataclasses import dataclass

from ..case import STEP
from ..outcome import require
from ..tensors import flatten, largest_difference, read_safetensors, write_batches

GOLDEN = ["torch_llama_tiny", "torch_llama_masked_tied"]


@dataclass
class Tolerance:
    """Relative for losses and norms, relative to a tensor's largest entry for gradients, absolute for weights: those of
    crates/trainer/tests/steps/torch_reference.rs."""
    loss: float
    grad_norm: float
    gradient: float
    weight: float

TOLERANCES = {"f32": Tolerance(1e-5, 1e-5, 1e-4, 1e-4), "bf16": Tolerance(5e-4, 5e-3, 4e-2, 1e-2)}
# Runs of another dtype must differ by at least this, or that dtype was not used.
BF16_AT_LEAST = 1e-4
CASES = dict.fromkeys(TOLERANCES, 15)


def sources(_case):
    return STEP


def run(place, found, dtype):
    cases = [(name, dtype, attention, mode) for name in GOLDEN for attention in ("eager", "flash") for mode in ("none", "full")]
    references = {name: Reference(place, name) for name in GOLDEN}
    finals = {case: place.file("final-" + "-".join(case)) for case in cases}
    commands = [references[case[0]].arguments(case) + ["--save-final", finals[case]] for case in cases]
    runs = place.train_all(commands)
    rows = found.table("Largest differences from PyTorch", "reference", "type", "attention", "recompute", "loss", "gradient norm",
                       "gradient", "weight")
    for case, trained in zip(cases, runs):
        distance = references[case[0]].distance(trained, finals[case])
        rows.append([*case, *(f"{value:.1e}" for value in distance.values())])
        for name, value in distance.items():
            found.figures[name] = max(found.figures.get(name, 0.0), value)
        judge(case, distance)


def judge(case, distance):
    allowed = TOLERANCES[case[1]]
    for name, value in distance.items():
        require(value <= getattr(allowed, name), f"{', '.join(case)}: {name} differs by {value:.2e}, "
                                                 f"{getattr(allowed, name):.0e} is allowed")
    is_bf16 = distance["gradient"] > BF16_AT_LEAST
    require(is_bf16 == (case[1] == "bf16"), f"{', '.join(case)}: by its gradients this was not {case[1]}")


class Reference:
    """PyTorch's results (crates/trainer/tests/golden/README.md)."""

    def __init__(self, place, name):
        self.folder = place.bundle / "golden" / name
        self.json = json.loads((self.folder / "reference.json").read_text())
        self.batches = place.file(f"{name}.safetensors")
        write_batches(self.batches, flatten(self.json["input_ids"]), flatten(self.json["targets"]), self.json["seq"])

    def arguments(self, case):
        """The command line that repeats it. The head's chunk is small enough for several."""
        _, dtype, attention, mode = case
        return ["--init-from", self.folder, "--data", self.batches, "--no-shuffle", "--micro-batch", self.json["micro_batch"],
                "--accum", self.json["accum"], "--steps", len(self.json["steps"]), "--lr", self.json["optimizer"]["lr"],
                "--set", "memory.head_chunk=40", "--dtype", dtype, "--attention", attention, "--recompute", mode,
                "--dump-gradients", 1]

    def distance(self, trained, final):
        """The largest differences of a run from it."""
        steps, expected = trained.metrics.steps, self.json["steps"]
        require(len(steps) == len(expected) > 0, f"{len(steps)} steps for {len(expected)}")
        for step, reference in zip(steps, expected):
            require(step["tokens"] == reference["target_tokens"], "another number of targets")
        relative = lambda name: max(abs(step[name] / reference[name] - 1) for step, reference in zip(steps, expected))
        gradients = read_safetensors(trained.folder / "gradients" / "step-1.safetensors")
        weights = read_safetensors(final / "model.safetensors")
        gradient, _ = largest_difference(gradients, read_safetensors(self.folder / "grads_step0.safetensors"), True)
        weight, _ = largest_difference(weights, read_safetensors(self.folder / "model_final.safetensors"), False)
        return dict(loss=relative("loss"), grad_norm=relative("grad_norm"), gradient=gradient, weight=weight)
