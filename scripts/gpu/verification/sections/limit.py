"""Out of memory: at the plan's peak there is enough, a granule below there is not, and the fixes work."""
from ..case import MEMORY
from ..outcome import require

GIB = 2**30

FULL = "a full card"
CASES = {"none": 12, "core_attn,mlp": 12, FULL: 20}


def sources(_case):
    return MEMORY


def run(place, found, case):
    rows = found.table("Limits", "run", "limit, bytes", "exit code", "measured peak, bytes")
    if case == FULL:
        place.need_gpu("a full card")
        return a_full_card(place, found, rows)
    model = ["--config", "llama-15m", "--dtype", "bf16", "--micro-batch", 4] if place.is_gpu else ["--config", "tiny"]
    at_the_limit(place, found, rows, [*model, "--recompute", case, "--steps", 2])


def peak(trained):
    return max(trained.metrics.peaks(), default=0)


def at_the_limit(place, found, rows, arguments):
    name = " ".join(map(str, arguments)).replace("--", "")
    plan = place.plan(*arguments)
    enough, granule = plan["peak_bytes"], plan["granularity_bytes"]

    def limited(limit, *more):
        trained = place.try_training(*arguments, "--memory-limit", limit, *more)
        rows.append([" ".join([name, *more[1::2]]), f"{limit:,}", str(trained.finished.code), f"{peak(trained):,}"])
        return trained

    trained = limited(enough)
    require(trained.finished.code == 0, f"{name} at its planned peak of {enough:,} bytes: {trained.finished.complaint()}")
    require(peak(trained) == enough, f"{name}: a peak of {peak(trained):,} bytes, {enough:,} were planned")
    short = limited(enough - granule)
    code = short.finished.code
    require(code == 3, f"{name} with {granule} bytes less than its planned peak: exit code {code}, not 3: {short.finished.complaint()}")
    oom = short.json("oom.json")
    require(oom["limit_bytes"] == enough - granule and oom["cause"] == "capacity", f"{name}: oom.json says {oom['cause']}, {oom['limit_bytes']}")
    require(oom["fixes"], f"{name}: oom.json has no fix")
    least = min(oom["fixes"], key=lambda fix: fix["peak_bytes"])
    for fix in [oom["fixes"][0], least]:
        fixed = limited(enough - granule, *settings(fix))
        require(fixed.finished.code == 0, f"{name} with the fix {fix['set']}: {fixed.finished.complaint()}")
        require(peak(fixed) == fix["peak_bytes"], f"{name} with {fix['set']}: a peak of {peak(fixed):,} bytes, not {fix['peak_bytes']:,}")
    found.figures.update(peak_bytes=enough, granularity_bytes=granule, refused=oom["name"], fixes=len(oom["fixes"]))


def settings(fix):
    return [word for setting in fix["set"] for word in ("--set", setting)]


def a_full_card(place, found, rows):
    """A run that needs more than all memory of the card, without any other limit."""
    total = place.gpu()["memory"]["total"]
    # As many sequences as the built-in text has, or fewer.
    for micro_batch in (48, 96, 144, 190):
        arguments = ["--config", "qwen2.5-0.5b", "--dtype", "bf16", "--seq", 1024, "--micro-batch", micro_batch, "--accum", 1, "--steps", 1]
        reserved = place.plan(*arguments)["reserved_bytes"]
        if reserved > total:
            break
    else:
        found.notes.append(f"a full card was not tried: {reserved / GIB:.0f} GiB are not more than it has")
        return
    name = " ".join(map(str, arguments)).replace("--", "")
    trained = place.try_training(*arguments)
    rows.append([f"{name} ({reserved:,} bytes)", "the card", str(trained.finished.code), "-"])
    require(trained.finished.code == 3, f"{name} on a card of {total:,} bytes: {trained.finished.complaint()}")
    oom = trained.json("oom.json")
    require(oom["device_bytes"] and oom["limit_bytes"] is None, f"{name}: oom.json does not say that the card was full")
    require(oom["cause"] == "capacity" and oom["fixes"], f"{name}: the cause is {oom['cause']}, with {len(oom['fixes'])} fixes")
    least = min(oom["fixes"], key=lambda fix: fix["peak_bytes"])
    fixed = place.try_training(*arguments, *settings(least))
    rows.append([f"{name} {' '.join(least['set'])}", "the card", str(fixed.finished.code), f"{peak(fixed):,}"])
    require(fixed.finished.code == 0, f"{name} with the fix {least['set']}: {fixed.finished.complaint()}")
    found.figures.update(reserved_bytes=reserved, total_bytes=total, refused=oom["name"], fix=" ".join(least["set"]))
