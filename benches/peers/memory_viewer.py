#!/usr/bin/env python3
"""Draws a run's memory snapshot with PyTorch's own `torch/cuda/_memory_viz.py`.

  benches/peers/memory_viewer.py runs/NAME/memory [--torch WHEEL_OR_FILE] [--out FOLDER]

That file needs no torch. It is taken from an installed torch, or from what --torch names: a wheel (`pip download --no-deps
torch==2.13.0`) or the file itself. Prints `stats`, writes `trace_plot.html` and `segment_plot.html`, and shows that what
these embed is the snapshot. The pages fetch their viewer, MemoryViz.js, from PyTorch's repository when they are opened.
"""
import argparse
import base64
import importlib.util
import json
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import zipfile

VIEWER = "torch/cuda/_memory_viz.py"


def viewer(torch, folder):
    """The path of the viewer's file."""
    if torch is None:
        found = importlib.util.find_spec("torch")
        if found is None:
            sys.exit("no torch is installed: name its wheel with --torch (pip download --no-deps torch==2.13.0)")
        return pathlib.Path(found.origin).parent / "cuda/_memory_viz.py"
    if not zipfile.is_zipfile(torch):
        return torch
    with zipfile.ZipFile(torch) as wheel:
        return pathlib.Path(wheel.extract(VIEWER, folder))


def embedded(page):
    """The snapshot in a page."""
    text = base64.b64decode(json.loads(re.search(r"const local_files = (\[.*\])", page.read_text())[1])[0]["base64"])
    return pickle.loads(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="has snapshot.pickle")
    parser.add_argument("--torch", type=pathlib.Path, help="a wheel of torch, or its _memory_viz.py")
    parser.add_argument("--out", type=pathlib.Path, help="where pages go (default: the folder)")
    args = parser.parse_args()
    out, snapshot = args.out or args.folder, args.folder / "snapshot.pickle"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, viewer(args.torch, folder)]
        subprocess.run([*command, "stats", snapshot], check=True)
        trace = subprocess.run([*command, "trace", snapshot], check=True, capture_output=True, text=True).stdout
        print(f"trace: {len(trace.splitlines())} lines")
        for plot in ["trace_plot", "segment_plot"]:
            page = out / f"{plot}.html"
            subprocess.run([*command, plot, snapshot, "-o", page], check=True)
            data = embedded(page)
            assert data == pickle.loads(snapshot.read_bytes()), f"{page} embeds another snapshot"
            print(f"{page}: {page.stat().st_size} bytes, {len(data['device_traces'][0])} entries")


if __name__ == "__main__":
    main()
