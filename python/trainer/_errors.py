"""What the program and the library refuse, as exceptions."""


class TrainerError(Exception):
    """The program or the library failed. The text is its own message, with its hints.

    `exit_code` is the program's (docs/reference/exit-codes.md); `result` is what it printed all the same, or None.
    """

    def __init__(self, message, exit_code, result=None):
        super().__init__(message)
        self.exit_code = exit_code
        self.result = result


class UsageError(TrainerError, ValueError):
    """A setting, a shape or a type that cannot be."""


class OutOfMemory(TrainerError, MemoryError):
    """Memory was refused. `tensor` is what asked for it, and `requested_bytes` how much, where one tensor did.

    `fixes` are settings under which its steps would fit, as in `oom.json`, the cheapest first that keep the loss bitwise the same: each has
    `set`, a list for the keyword of that name, and `peak_bytes`, `saves_bytes`, `cost_fraction`, `changes_math` and `is_other_training`.
    """

    def __init__(self, message, exit_code, tensor=None, requested_bytes=None, fixes=()):
        super().__init__(message, exit_code)
        self.tensor = tensor
        self.requested_bytes = requested_bytes
        self.fixes = list(fixes)
