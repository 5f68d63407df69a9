"""Reads the files of a run of the trainer."""
import json
import statistics
from dataclasses import dataclass, field


@dataclass
class Metrics:
    """metrics.jsonl: the first record, a record for each step, the last record, and the others."""
    header: dict = field(default_factory=dict)
    others: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    end: dict = field(default_factory=dict)

    @staticmethod
    def parse(text):
        metrics = Metrics()
        for line in text.splitlines():
            record = json.loads(line)
            match record["kind"]:
                case "run":
                    metrics.header = record
                case "step":
                    metrics.steps.append(record)
                case "end":
                    metrics.end = record
                case _:
                    metrics.others.append(record)
        return metrics

    def bits(self):
        """Loss and gradient norm of every step. They are written in their shortest form that reads back as the same f32,
        so equal numbers are equal bits."""
        return [(step["loss"], step["grad_norm"]) for step in self.steps]

    def is_finite(self):
        return all(step["finite"] and None not in (step["loss"], step["grad_norm"]) for step in self.steps)

    def replayed(self):
        """How often each stage was replayed in the last step."""
        return tuple(sorted(self.steps[-1]["replayed"].items()))

    def peaks(self):
        return {step["peak_bytes"] for step in self.steps}

    def median(self, name, skip):
        """The median of a figure over the steps after the first ones."""
        values = [step[name] for step in self.steps[skip:] if step[name] is not None]
        return statistics.median(values) if values else None

    def mean_loss(self, last):
        return statistics.mean(step["loss"] for step in self.steps[-last:])
