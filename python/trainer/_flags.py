"""Keywords as the command line has them."""


def flags_of(keywords):
    """`micro_batch=2` is `--micro-batch=2`, True is a flag without a value, and a list gives it once for each value."""
    for name, value in keywords.items():
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                yield flag
            elif one is not None and one is not False:
                yield f"{flag}={one}"
