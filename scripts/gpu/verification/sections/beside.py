"""What runs beside training: evaluation, samples, generation. Their memory is planned, and nothing is loaded for them after the rehearsal."""
import json

from ..case import ATTENTION, crate, kernels
from ..outcome import require
from . import rehearsal

CASES = {"evaluation and samples": 12, "generate": 10, "generate, latents": 10}
PROMPT = ["--prompt", "The ", "--max-tokens", 24, "--dtype", "f32", "--json"]


def sources(case):
    if case == "evaluation and samples":
        return (*ATTENTION, *crate("session", "evaluation", "inference", "sampling"))
    return (*ATTENTION, *kernels("cache"), *(kernels("latent") if "latents" in case else ()), *crate("session", "generation", "inference"), *crate("model", "inference", "kv_cache"))


def run(place, found, case):
    if case == "evaluation and samples":
        return evaluate(place, found)
    model = place.file(f"model of {case}")
    place.train("--config", "tiny-mla" if "latents" in case else "tiny", "--steps", 2, "--save-final", model)
    cached, whole = (generate(place, model, *more) for more in ([], ["--no-cache"]))
    require(cached["kv_cache"] and not whole["kv_cache"], f"{case}: --no-cache changes nothing")
    texts = [said["generations"][0]["tokens"] for said in (cached, whole)]
    require(texts[0] == texts[1], f"{case}: with a cache another text than without")
    found.figures.update(tokens=len(texts[0]), peak_bytes=cached["peak_bytes"])


def generate(place, model, *more):
    finished = place.trainer("generate", model, "--device", place.device, *PROMPT, *more)
    require(finished.code == 0, f"trainer generate: {finished.complaint()}")
    said = json.loads(finished.stdout)
    require(said["peak_bytes"] == said["planned_peak_bytes"], f"generate: planned {said['planned_peak_bytes']:,} bytes, measured {said['peak_bytes']:,}")
    return said


def evaluate(place, found):
    documents = place.bundle / "golden" / "documents"
    flags = ["--config", "tiny", "--data", documents, "--seq", 256, "--steps", 4]
    plain = place.train(*flags)
    # In steps 2 and 4, so that steps before and after one are there.
    trained = place.train(*flags, "--eval-data", documents, "--eval-every", 2, "--sample-every", 2)
    kinds = {record["kind"] for record in trained.metrics.others}
    require({"eval", "sample"} <= kinds, f"of evaluations and samples there are only {sorted(kinds)}")
    require(trained.metrics.bits() == plain.metrics.bits(), "evaluation changes the bits of training")
    for record in trained.metrics.others:
        if record["kind"] == "eval":
            require(record["peak_bytes"] == record["planned_peak_bytes"], f"evaluation: planned {record['planned_peak_bytes']:,} bytes, "
                                                                          f"measured {record['peak_bytes']:,}")
    if place.is_cuda:
        beside = rehearsal.beside_pool(trained.metrics)
        rehearsal.judge("evaluation and samples", beside)
        found.figures["beside_bytes"] = beside[-1]
