"""Steps made from Python beside those of the command: python python_steps.py [ROUNDS]

Both train the same model on rows of the same size, in turn, in processes of their own. The command's time of a step is `step_ms` of its metrics; that of a
step from Python is what passes around the call, with the arrays' way in and the record's way out. The first steps are left out.
"""
import json
import statistics
import subprocess
import sys
import tempfile

import trainer

STEPS, SKIPPED = 20, 4
RUNS = {
    "llama-15m, 8 rows of 256 tokens": dict(config="llama-15m", seq=256, micro_batch=4, accum=2),
    "tiny, 4 rows of 64 tokens": dict(config="tiny", seq=64, micro_batch=2, accum=2),
}

IN_PROCESS = """
import json, sys, time, trainer
flags, steps = json.loads(sys.argv[1]), int(sys.argv[2])
rows = flags["micro_batch"] * flags["accum"]
ids = [[(7 * row + token) % 256 for token in range(flags["seq"] + 1)] for row in range(rows)]
times = []
with trainer.Trainer(**flags, device="cpu", steps=steps, warmup=1) as model:
    for _ in range(steps):
        begun = time.perf_counter()
        model.step(ids, ids)
        times.append(1e3 * (time.perf_counter() - begun))
print(json.dumps(times))
"""


def command(flags):
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        words += ["--device=cpu", f"--steps={STEPS}", "--warmup=1", "--quiet", f"--out={folder}/run", "--save-every=0"]
        subprocess.run([trainer.binary(), *words], check=True, capture_output=True)
        with open(f"{folder}/run/metrics.jsonl") as lines:
            records = map(json.loads, lines)
            return [record["step_ms"] for record in records if record["kind"] == "step"]


def in_process(flags):
    said = subprocess.run([sys.executable, "-c", IN_PROCESS, json.dumps(flags), str(STEPS)], check=True, capture_output=True)
    return json.loads(said.stdout)


def main(rounds=5):
    for name, flags in RUNS.items():
        ratios = []
        for number in range(rounds):
            order = [command, in_process][::1 if number % 2 == 0 else -1]
            times = {way: statistics.median(way(flags)[SKIPPED:]) for way in order}
            ratios.append(times[in_process] / times[command])
            print(f"{name}: command {times[command]:.2f} ms, Python {times[in_process]:.2f} ms, ratio {ratios[-1]:.3f}")
        print(f"{name}: median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
