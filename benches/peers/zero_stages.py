#!/usr/bin/env python3
"""Trains one small Llama in processes of PyTorch (DDP, FSDP) and DeepSpeed (ZeRO 0 to 3), on the CPU over gloo, and with the
trainer at every stage, with the same micro-batches in the same hands: losses have to agree, and the weights after the last
step are compared bit for bit.

  eval "$(benches/peers/zero_stages_setup)"
  LD_LIBRARY_PATH=$PEER_LD $PEER_PYTHON benches/peers/zero_stages.py [--trainer target/release/trainer] [--ranks 1 2]

A step has four micro-batches of one sample, with different numbers of targets in `transformers/llama`; micro-batch
a * ranks + r is computed by rank r, each loss divided by the targets of the whole step. Every row is a run in processes of its
own, with one thread each. Rows with the same letter end with the same weights, bit for bit; where two rows of one way differ
in letter, its stage, its bucket size or its number of ranks changed the bits. What cannot be run says why, and is no row that
agrees. Exits 1 if a loss or a norm is beyond its tolerance, or if the trainer's rows do not all have one letter.
"""
import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MASKED = -100
MICRO_BATCHES = 4  # of a step, over all ranks
TOLERANCE = 1e-5  # of losses and norms, relative
NO_GROUP = "trainer, no group"

# The runs: a family, the name in the table, and the arguments of its worker. `bucket` is in elements; FSDP has none,
# and reduces a unit at a time: a block (`units`), or the whole model.
WAYS = [
    *[("ddp", f"DDP, reduces every {reduce}", dict(reduce=reduce, bucket=bucket))
      for reduce in ("step", "micro-batch") for bucket in (0, 1000)],
    *[("fsdp", f"FSDP {name}, reduces every {reduce}", dict(reshard=reshard, reduce=reduce, units=units))
      for name, reshard in (("SHARD_GRAD_OP", False), ("FULL_SHARD", True))
      for reduce in ("step", "micro-batch") for units in ("block", "model")],
    *[("deepspeed", f"DeepSpeed ZeRO {stage}", dict(stage=stage, bucket=bucket)) for stage in range(4) for bucket in (0, 1000)],
]


class NotRun(Exception):
    """A run that is not possible here, with the reason."""


# ---- a rank of a peer ----------------------------------------------------------------------------------------------


class Data:
    """Micro-batches of a reference's rows: four a step, each with its rows of ids and targets."""

    def __init__(self, torch, reference):
        self.settings = reference["optimizer"]
        shape = (len(reference["steps"]), MICRO_BATCHES, -1, reference["seq"])
        self.ids = torch.tensor(reference["input_ids"]).reshape(shape)
        self.targets = torch.tensor(reference["targets"]).reshape(shape)

    def micro_batches(self, step, rank, size):
        """A rank's micro-batches, each with the number of targets of the whole step."""
        count = int((self.targets[step] != MASKED).sum())
        for index in range(rank, MICRO_BATCHES, size):
            yield dict(input_ids=self.ids[step, index], labels=self.targets[step, index],
                       shift_labels=self.targets[step, index], num_items_in_batch=count)


def adamw(torch, model, settings):
    parameters = list(model.parameters())
    groups = [dict(params=[p for p in parameters if p.ndim >= 2], weight_decay=settings["weight_decay"]),
              dict(params=[p for p in parameters if p.ndim < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=settings["lr"], betas=settings["betas"], eps=settings["eps"])


class Ddp:
    """The whole model on every rank; `no_sync` keeps a step's earlier micro-batches from being reduced."""

    def __init__(self, torch, model, settings, size, reduce, bucket):
        self.torch, self.size, self.reduce, self.clip = torch, size, reduce, settings["clip_grad_norm"]
        self.bare = model
        options = dict(bucket_cap_mb=bucket * 4 / 2**20) if bucket else {}
        self.model = torch.nn.parallel.DistributedDataParallel(model, **options)
        self.optimizer = adamw(torch, model, settings)

    def backward(self, micro, is_last):
        waits = self.reduce == "step" and not is_last
        with self.model.no_sync() if waits else contextlib.nullcontext():
            loss = self.model(**micro).loss
            (loss * self.size).backward()  # DDP averages gradients over ranks; we want the step's sum
        return loss.item()

    def step(self):
        norm = self.torch.nn.utils.clip_grad_norm_(self.bare.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weights(self):
        return dict(self.bare.named_parameters())


class Fsdp:
    """`fully_shard`: a unit's weights are gathered before its use, and freed after forward if `reshard` is set."""

    def __init__(self, torch, model, settings, size, reshard, reduce, units):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        self.torch, self.size, self.reduce, self.clip = torch, size, reduce, settings["clip_grad_norm"]
        self.model, mesh = model, init_device_mesh("cpu", (size,))
        for block in model.model.layers if units == "block" else []:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        self.optimizer = adamw(torch, model, settings)

    def backward(self, micro, is_last):
        self.model.set_requires_gradient_sync(self.reduce == "micro-batch" or is_last)
        loss = self.model(**micro).loss
        (loss * self.size).backward()
        return loss.item()

    def step(self):
        norm = self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip).full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weights(self):
        return {name: parameter.full_tensor() for name, parameter in self.model.named_parameters()}


class DeepSpeed:
    """DeepSpeed's engine around the same model and PyTorch's AdamW. It decides itself when to reduce what."""

    def __init__(self, torch, model, settings, size, stage, bucket):
        try:
            import deepspeed
        except ImportError as error:
            raise NotRun(f"DeepSpeed is not here: {error}")
        self.torch, self.deepspeed, self.stage = torch, deepspeed, stage
        # Tensors under the threshold would stay whole on every rank, and in so small a model all are.
        zero = dict(stage=stage, stage3_param_persistence_threshold=0)
        if bucket:
            zero |= dict(reduce_bucket_size=bucket, allgather_bucket_size=bucket, stage3_prefetch_bucket_size=bucket)
        config = dict(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=MICRO_BATCHES // size,
                      gradient_clipping=settings["clip_grad_norm"], zero_optimization=zero, zero_allow_untested_optimizer=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(torch, model, settings), config=config)

    def backward(self, micro, is_last):
        loss = self.engine(**micro).loss
        self.engine.backward(loss * MICRO_BATCHES)  # it divides by accumulation and ranks
        if not is_last:
            self.engine.step()
        return loss.item()

    def step(self):
        # In f32 the engine does not give the norm at stage 0; the gradients are whole and reduced here, so compute it.
        whole = [parameter.grad for parameter in self.engine.module.parameters()] if self.stage == 0 else None
        own = whole and float(self.torch.nn.utils.get_total_norm(whole))
        self.engine.step()
        return own or float(self.engine.get_global_grad_norm())

    def weights(self):
        parameters = dict(self.engine.module.named_parameters())
        with self.deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=self.stage == 3):
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def train(way, torch, data, steps, rank, size):
    """Loss and norm of every step."""
    results = []
    for step in range(steps):
        micros = list(data.micro_batches(step, rank, size))
        own = [way.backward(micro, is_last=micro is micros[-1]) for micro in micros]
        everybodys = [None] * size
        torch.distributed.all_gather_object(everybodys, own)
        results.append(dict(loss=sum(map(sum, everybodys)), grad_norm=way.step()))
    return results


def work(job):
    """One rank of a peer's run; rank 0 writes the results."""
    import torch
    import transformers
    from safetensors.torch import save_file
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    folder, out = pathlib.Path(job["reference"]), pathlib.Path(job["out"])
    reference = json.loads((folder / "reference.json").read_text())
    data = Data(torch, reference)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                              local_files_only=True).train()
    kinds = dict(ddp=Ddp, fsdp=Fsdp, deepspeed=DeepSpeed)
    try:
        way = kinds[job["kind"]](torch, model, data.settings, size, **job["options"])
    except NotRun as error:
        sys.exit(f"not run: {error}")
    steps = train(way, torch, data, len(reference["steps"]), rank, size)
    weights = {name: tensor.detach().contiguous() for name, tensor in way.weights().items()}
    if rank == 0:
        save_file(weights, out / "weights.safetensors")
        (out / "steps.json").write_text(json.dumps(steps))
    torch.distributed.destroy_process_group()


# ---- runs ----------------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def last_words(text):
    """The reason that a failed process printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(\[rank\d+\]: *)?([\w.]*(Error|Exception)\b|not run:|error:)", line)]
    return (telling or lines or ["it said nothing"])[-1][:300]


def run_peer(kind, options, size, reference, out, timeout):
    job = json.dumps(dict(kind=kind, options=options, reference=str(reference), out=str(out)))
    shared = os.environ | dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                               OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TOKENIZERS_PARALLELISM="false",
                               # The folder of ninja, which DeepSpeed needs to compile an operation when it is first
                               # used.
                               PATH=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
    logs = [out / f"rank-{rank}.log" for rank in range(size)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as stream:
                ranks.append(subprocess.Popen([sys.executable, __file__, "--work", job], stdout=stream, stderr=stream,
                                              env=shared | dict(RANK=str(rank), LOCAL_RANK=str(rank))))
        codes = [process.wait(timeout) for process in ranks]
    except subprocess.TimeoutExpired:
        raise NotRun(f"it did not end within {timeout} s: {last_words(logs[0].read_text())}")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        failed = next(rank for rank, code in enumerate(codes) if code)
        raise NotRun(last_words(logs[failed].read_text()))
    return json.loads((out / "steps.json").read_text())


def write_batches(reference, path):
    """The rows in the order in which the trainer takes them."""
    import torch
    from safetensors.torch import save_file
    rows = {name: torch.tensor(reference[name]).reshape(-1, reference["seq"]).to(torch.int32).contiguous()
            for name in ("input_ids", "targets")}
    save_file(rows, path)


def run_trainer(arguments, stage, bucket, size, reference, out):
    settings = json.loads((reference / "reference.json").read_text())
    write_batches(settings, out / "batches.safetensors")
    launcher = shlex.split(arguments.launcher.format(ranks=size)) if size > 1 else []
    flags = [] if stage is None else ["--zero", stage, *(["--bucket-size", bucket] if bucket else [])]
    rows = sum(len(micro) for micro in settings["input_ids"][0])
    command = [*launcher, arguments.trainer.resolve(), "train", "--init-from", reference, "--data", out / "batches.safetensors",
               "--no-shuffle", "--micro-batch", rows // MICRO_BATCHES, "--accum", MICRO_BATCHES // size,
               "--steps", len(settings["steps"]), "--lr", settings["optimizer"]["lr"], "--save-final", out / "final",
               "--out", out / "run", "--device", "cpu", "--dtype", "f32", "--threads", 1, "--quiet", *flags]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=arguments.timeout)
    if result.returncode:
        raise NotRun(f"exit code {result.returncode}: {last_words(result.stderr)}")
    shutil.copy(out / "final" / "model.safetensors", out / "weights.safetensors")
    lines = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


def jobs(arguments):
    """Every run: its name, what it varies, its number of ranks, and a function that makes it in a folder."""
    reference = arguments.reference.resolve()
    for kind, name, options in WAYS:
        detail = f"bucket {options['bucket'] or 'default'}" if "bucket" in options else f"a unit is a {options['units']}"
        for size in arguments.ranks:
            if kind in arguments.kinds:
                make = lambda out, kind=kind, options=options, size=size: run_peer(kind, options, size, reference, out, arguments.timeout)
                yield kind, name, detail, size, make
    if "trainer" in arguments.kinds:
        ours = [(stage, bucket, size) for stage in range(4) for bucket in (None, "4KiB") for size in arguments.ranks]
        for stage, bucket, size in [(None, None, 1), *ours]:
            name = NO_GROUP if stage is None else f"trainer --zero {stage}"
            make = lambda out, stage=stage, bucket=bucket, size=size: run_trainer(arguments, stage, bucket, size, reference, out)
            yield "trainer", name, f"bucket {bucket or 'default'}", size, make


# ---- what came out -------------------------------------------------------------------------------------------------


def digest(weights):
    """Of all weights by name; -0 and 0 differ."""
    state = hashlib.sha256()
    for name in sorted(weights):
        state.update(name.encode() + b"\0" + weights[name].numpy().tobytes())
    return state.hexdigest()


def error(found, expected, key):
    pairs = list(zip(found, expected, strict=True))
    return max(abs(ours[key] - theirs[key]) / abs(theirs[key]) for ours, theirs in pairs)


def differing(found, expected):
    """The share of weights whose bits are not the expected ones."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    count = sum(int((found[name] != tensor).sum()) for name, tensor in expected.items())
    return count / sum(tensor.numel() for tensor in expected.values())


def letter(index):
    return (letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def versions():
    import torch
    import transformers
    found = f"torch {torch.__version__}, transformers {transformers.__version__}"
    with contextlib.suppress(ImportError):
        import importlib.metadata
        found += f", deepspeed {importlib.metadata.version('deepspeed')}"
    return found


def measure(arguments):
    """Runs everything, prints a row for each, and gives the rows."""
    from safetensors.torch import load_file
    reference = json.loads((arguments.reference / "reference.json").read_text())
    first, letters, rows = None, {}, []
    print(f"{versions()}; {arguments.reference.name}; loss and norm beside PyTorch's in one process\n")
    print("| way | varied | ranks x accum | loss of the last step | loss, largest error | norm, largest error | weights "
          "| unlike the first row's |\n|---|---|---|---:|---:|---:|---|---:|")
    for kind, name, detail, size, make in jobs(arguments):
        place = f"| {name} | {detail} | {size} x {MICRO_BATCHES // size} |"
        with tempfile.TemporaryDirectory() as out:
            try:
                steps = make(pathlib.Path(out))
            except (NotRun, subprocess.TimeoutExpired) as reason:
                print(f"{place} not run: {reason} | | | | |", flush=True)
                rows.append(dict(kind=kind, name=name, detail=detail, ranks=size, not_run=str(reason)))
                continue
            weights = load_file(pathlib.Path(out) / "weights.safetensors")
        first = first or weights
        key = digest(weights)
        row = dict(kind=kind, name=name, detail=detail, ranks=size, losses=[step["loss"] for step in steps],
                   grad_norms=[step["grad_norm"] for step in steps], sha256=key,
                   letter=letters.setdefault(key, letter(len(letters))), differing=differing(weights, first),
                   loss_error=error(steps, reference["steps"], "loss"), norm_error=error(steps, reference["steps"], "grad_norm"))
        rows.append(row)
        print(f"{place} {row['losses'][-1]:.7f} | {row['loss_error']:.1e} | {row['norm_error']:.1e} | {row['letter']} "
              f"| {100 * row['differing']:.1f} % |", flush=True)
    return rows


def judge(rows, ranks):
    """Prints which runs agree, and returns whether all agree that must."""
    cells = collections.defaultdict(dict)
    for row in rows:
        cells[row["name"], row["ranks"]].setdefault(row.get("letter", "not run"))
    print("\nThe weights of each way, one letter where what is varied changes nothing:\n")
    print("| way | " + " | ".join(f"{size} x {MICRO_BATCHES // size}" for size in ranks) + " |\n|---|" + "---|" * len(ranks))
    for name in dict.fromkeys(row["name"] for row in rows):
        print(f"| {name} | " + " | ".join(", ".join(cells[name, size]) or "-" for size in ranks) + " |")
    beyond = [row["name"] for row in rows if max(row.get("loss_error", 0), row.get("norm_error", 0)) > TOLERANCE]
    # A run without a group adds up gradients where they are made, in another order.
    ours = {row.get("letter", "not run") for row in rows if row["kind"] == "trainer" and row["name"] != NO_GROUP}
    is_one = "not run" not in ours and len(ours) <= 1
    print("\nbeyond the tolerance: " + (", ".join(dict.fromkeys(beyond)) or "nothing"))
    if ours:
        print("the trainer's stages: " + ("the same bits" if is_one else "NOT the same bits: " + ", ".join(sorted(ours))))
    return not beyond and is_one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=pathlib.Path, default=REPOSITORY / "crates/trainer/tests/golden/transformers/llama",
                        help="a model in Hugging Face layout with reference.json, untied")
    parser.add_argument("--kinds", nargs="+", default=["ddp", "fsdp", "deepspeed", "trainer"],
                        choices=["ddp", "fsdp", "deepspeed", "trainer"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2, 4])
    parser.add_argument("--trainer", type=pathlib.Path, default=REPOSITORY / "target/release/trainer")
    parser.add_argument("--launcher", default="mpirun -n {ranks} --bind-to none --oversubscribe")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each run")
    parser.add_argument("--json", type=pathlib.Path, help="where to write all figures")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(json.loads(arguments.work))
    rows = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(not judge(rows, arguments.ranks))


if __name__ == "__main__":
    main()
