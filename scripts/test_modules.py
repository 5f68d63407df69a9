"""Which modules of a Rust file are tests."""

import re

# The name of a test module, and whether its body is in the file (` {`) or in one of its own (`;`).
TESTS = re.compile(r"#\[cfg\((?:all\()?test\b.*\]\s*(?:pub(?:\(\w+\))? )?mod (\w+)( \{|;)")


def without_tests(text):
    """A file up to its test module, which is the last thing in it."""
    found = next((found for found in TESTS.finditer(text) if found[2] == " {"), None)
    return text[: found.start()] if found else text
