"""Records the CPU's allocations as a memory snapshot: `with cpu_snapshot(FILE): train_step()`.

The profiler is told of every allocation and free of PyTorch's CPU allocator, with its size, while it runs. What was
allocated before is not counted, so make the model within the block too.
"""
import contextlib
import pickle

from torch.profiler import ProfilerActivity, profile


def frames(event):
    """The Python stack of an event, innermost frame first."""
    calls = []
    while event := event.parent:
        if event.tag.name in ("PyCall", "PyCCall"):
            inner = [event.extra_fields.callsite] if event.tag.name == "PyCall" and not calls else []
            calls += inner + [event.extra_fields.caller]
    return [{"filename": call.file_name, "line": call.line_number, "name": call.function_name} for call in calls]


def entries(event, size, stack):
    freed = ["free_requested", "free_completed"]
    for action in freed if size < 0 else ["alloc"]:
        yield {"action": action, "addr": event.extra_fields.ptr, "size": abs(size), "stream": 0, "frames": stack,
               "time_us": event.start_time_ns // 1000}


@contextlib.contextmanager
def cpu_snapshot(file):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        yield
    found, rest = [], profiler.profiler.kineto_results.experimental_event_tree()
    while rest:
        event = rest.pop()
        rest += event.children
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            found.append(event)
    found.sort(key=lambda event: event.start_time_ns)
    trace = [entry for event in found for entry in entries(event, event.extra_fields.alloc_size, frames(event))]
    with open(file, "wb") as out:
        pickle.dump({"segments": [], "device_traces": [trace]}, out)
