#!/usr/bin/env python3
"""Writes memory snapshots as each version of PyTorch has them, with the peaks that follow from its own `_memory_viz.py`.

  benches/peers/snapshot_fixtures.py OUT [--torch WHEEL_OR_FILE ...]

Each file is made by hand in a version's format, with a protocol of its own. What is expected comes from that module: its
`trace` says which entries allocate and free, and how much, and its `memory` says what is live at the end, with sizes in
bytes once its `Bytes` prints them so. Of several modules (pip download --no-deps torch==2.1.0) all have to agree.
"""
import argparse
import contextlib
import importlib.util
import io
import json
import pathlib
import pickle
import re
import tempfile

from memory_viewer import viewer

MIB = 1 << 20
USER = {"filename": "/home/me/project/model.py", "line": 12, "name": "forward"}
OTHER = {"filename": "/home/me/project/train.py", "line": 40, "name": "step"}
TORCH = {"filename": "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 114, "name": "forward"}
NATIVE = {"filename": "??", "line": 0, "name": "torch::autograd::Engine::execute"}
STACKS = [[NATIVE, TORCH, USER, OTHER], [TORCH, OTHER], [OTHER], []]


class Format:
    """The fields that a version writes."""

    def __init__(self, times=True, addresses=True, pools=True, metadata=False, compiled=False, requested=True):
        self.times, self.addresses, self.pools, self.requested = times, addresses, pools, requested
        self.metadata, self.compiled = metadata, compiled
        self.clock = 0

    def entry(self, action, addr, size, stream=0, stack=0):
        self.clock += 7
        entry = {"action": action, "addr": addr, "size": size, "stream": stream, "frames": STACKS[stack]}
        if action == "oom":
            entry["device_free"] = entry.pop("addr")
        if self.times:
            entry["time_us"] = 1_700_000_000_000_000 + self.clock
        if self.compiled:
            entry["compile_context"] = "N/A"
        if self.metadata:
            entry["user_metadata"] = "warm up"
        if self.pools:
            entry["pool_id"] = (0, 0)
        return entry

    def segment(self, address, blocks, stream=0, device=0, expandable=False):
        """`blocks` are (size, requested, state, stack), side by side."""
        made, at = [], address
        for size, requested, state, stack in blocks:
            block = {"size": size, "requested_size": requested, "state": state, "frames": STACKS[stack]}
            if self.addresses:
                block["address"] = at
            if not self.requested:
                del block["requested_size"], block["frames"]
                if state != "inactive":
                    block["history"] = [{"addr": at, "real_size": requested, "frames": STACKS[stack]}]
            made.append(block)
            at += size
        live = [block for block in blocks if block[2] != "inactive"]
        segment = {"device": device, "address": address, "total_size": at - address, "stream": stream,
                   "allocated_size": sum(block[0] for block in live if block[2] == "active_allocated"),
                   "active_size": sum(block[0] for block in live), "segment_type": "large", "blocks": made}
        if self.pools:
            segment |= {"segment_pool_id": (0, 0), "is_expandable": expandable, "frames": [],
                        "requested_size": sum(block[1] for block in live)}
        return segment


def whole(form):
    """A recording from the first allocation on, with rounding, two streams and a segment given back."""
    a, b = 0x7F00_0000_0000, 0x7F00_1000_0000
    trace = [
        form.entry("segment_alloc", a, 20 * MIB), form.entry("alloc", a, 1000, 0, 0),
        form.entry("alloc", a + 1024, 3 * MIB + 5, 0, 0), form.entry("segment_alloc", b, 2 * MIB, 7),
        form.entry("alloc", b, MIB + 1, 7, 1), form.entry("free_requested", a + 1024, 3 * MIB + 5),
        form.entry("alloc", a + 8 * MIB, 4 * MIB, 0, 2), form.entry("free_completed", a + 1024, 3 * MIB + 5),
        form.entry("oom", 5 * MIB, 90 * MIB), form.entry("alloc", a + 1024, 2 * MIB, 0, 1),
        form.entry("free_requested", b, MIB + 1, 7), form.entry("free_completed", b, MIB + 1, 7),
        form.entry("segment_free", b, 2 * MIB, 7), form.entry("snapshot", 0, 0),
    ]
    blocks = [(1024, 1000, "active_allocated", 0), (2 * MIB, 2 * MIB, "active_allocated", 1),
              (6 * MIB - 1024, 0, "inactive", 3), (4 * MIB, 4 * MIB, "active_allocated", 2), (8 * MIB, 0, "inactive", 3)]
    return {"segments": [form.segment(a, blocks)], "device_traces": [trace]}


def late(form):
    """Recorded from the middle on: some of what was live is freed, some stays, and some waits for a stream."""
    a = 0x7F10_0000_0000
    trace = [
        form.entry("alloc", a + 2 * MIB, 512, 0, 0), form.entry("free_requested", a, 700),
        form.entry("free_completed", a, 700), form.entry("alloc", a + 4 * MIB, 10 * MIB, 0, 1),
        form.entry("free_requested", a + 4 * MIB, 10 * MIB), form.entry("free_completed", a + 4 * MIB, 10 * MIB),
        form.entry("alloc", a, 600, 0, 2),
    ]
    blocks = [(1024, 600, "active_allocated", 2), (MIB - 1024, MIB - 1500, "active_allocated", 3),
              (MIB, MIB - 3, "active_pending_free", 0), (2 * MIB, 512, "active_allocated", 0), (12 * MIB, 0, "inactive", 3)]
    return {"segments": [form.segment(a, blocks)], "device_traces": [trace]}


def expandable(form):
    """Expandable segments on two devices, of which the first has no events."""
    a = 0x7F20_0000_0000
    trace = [
        form.entry("segment_map", a, 20 * MIB), form.entry("alloc", a, 15 * MIB, 0, 0),
        form.entry("segment_map", a + 20 * MIB, 20 * MIB), form.entry("alloc", a + 15 * MIB, 15 * MIB, 0, 1),
        form.entry("free_requested", a + 15 * MIB, 15 * MIB), form.entry("free_completed", a + 15 * MIB, 15 * MIB),
        form.entry("segment_unmap", a + 20 * MIB, 20 * MIB),
    ]
    segments = [form.segment(a, [(15 * MIB, 15 * MIB, "active_allocated", 0), (5 * MIB, 0, "inactive", 3)],
                             device=1, expandable=True),
                form.segment(a - 64 * MIB, [(2 * MIB, 1_234_567, "active_allocated", 3)])]
    return {"segments": segments, "device_traces": [[], trace], "allocator_settings": {"expandable_segments": True}}


def still(form):
    """No events: nobody recorded."""
    return {"segments": [form.segment(0x7F20_0000_0000, [(512, 512, "active_allocated", 3), (2 * MIB - 512, 0, "inactive", 3)])],
            "device_traces": [[]]}


FIXTURES = {
    "history-2.0": (late, Format(times=False, addresses=False, pools=False, requested=False), 0),
    "whole-2.1": (whole, Format(times=False, addresses=False, pools=False), 1),
    "late-2.1": (late, Format(times=False, addresses=False, pools=False), 2),
    "late-2.5": (late, Format(compiled=False), 3),
    "expandable-2.5": (expandable, Format(), 4),
    "whole-2.9": (whole, Format(compiled=True, metadata=True), 4),
    "late-2.13": (late, Format(compiled=True, metadata=True), 5),
    "still-2.9": (still, Format(), 4),
}


def module(path):
    """A version's `_memory_viz.py`, whose `Bytes` prints all digits."""
    spec = importlib.util.spec_from_file_location("memory_viz", path)
    viz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(viz)
    viz.Bytes.__repr__ = lambda self: str(self.value)
    return viz


def live_at_end(viz, snapshot):
    """What the module's `memory` counts as live in all segments, in bytes."""
    lines = viz.memory(snapshot, format_flamegraph=lambda lines: lines).splitlines()
    parts = [line.rsplit(" ", 1) for line in lines]
    return sum(int(size) for name, size in parts if ";active" in name and "<gaps>" not in name)


def peak(viz, snapshot, device):
    """The largest sum of allocated bytes of a device, by the lines of the module's `trace`."""
    of_device = {"segments": [segment for segment in snapshot["segments"] if segment["device"] == device],
                 "device_traces": [snapshot["device_traces"][device]]}
    with contextlib.redirect_stdout(io.StringIO()):
        text = viz.trace(of_device)
    running, highest = 0, 0
    for line in text.splitlines():
        if allocated := re.fullmatch(r"\S+ = \S+\[\d+:(\d+)\]", line):
            running += int(allocated[1])
        elif freed := re.fullmatch(r"# free completed for \S+ (\d+)", line):
            running -= int(freed[1])
        highest = max(highest, running)
    return live_at_end(viz, of_device) - running + highest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--torch", type=pathlib.Path, action="append", help="wheels of torch, or their _memory_viz.py")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        modules = [module(viewer(torch, folder)) for torch in args.torch or [None]]
    for name, (make, form, protocol) in FIXTURES.items():
        snapshot = make(form)
        (args.out / f"{name}.pickle").write_bytes(pickle.dumps(snapshot, protocol))
        devices = [number for number in range(len(snapshot["device_traces"]))
                   if any(segment["device"] == number for segment in snapshot["segments"])]
        peaks = [{device: peak(viz, snapshot, device) for device in devices} for viz in modules]
        assert all(one == peaks[0] for one in peaks), f"{name}: versions disagree: {peaks}"
        expected[name] = peaks[0]
        print(name, peaks[0])
    (args.out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
