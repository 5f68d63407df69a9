"""Hashes of the sources that a case depends on: a result holds while they are the same."""
import fnmatch
import hashlib
import pathlib
import re
import subprocess

INCLUDE = re.compile(r'^#include "(\w+\.cuh)"', re.MULTILINE)


def git(root, *words):
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True).stdout


class Tree:
    """The paths of a checkout, or of a commit, and git's ids of their contents."""

    def __init__(self, root, commit=None):
        self.root, self.commit, self._texts = pathlib.Path(root), commit, {}
        if commit:
            entries = (line.split("\t") for line in git(root, "ls-tree", "-r", commit).decode().splitlines())
            self._ids = {path: facts.split()[2] for facts, path in entries}
        else:
            listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines()
            self._ids = {path: None for path in listed if (self.root / path).is_file()}

    def content(self, path):
        if path not in self._texts:
            self._texts[path] = git(self.root, "show", f"{self.commit}:{path}") if self.commit else (self.root / path).read_bytes()
        return self._texts[path]

    def id(self, path):
        if self._ids[path] is None:
            held = self.content(path)
            self._ids[path] = hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()
        return self._ids[path]

    def files(self, patterns):
        """The paths that a pattern names (`**` is any depth), and the headers that CUDA sources among them include."""
        found = [path for path in self._ids if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
        for path in found:
            if path.endswith((".cu", ".cuh")):
                included = [f"kernels/{name}" for name in INCLUDE.findall(self.content(path).decode())]
                found.extend(header for header in included if header in self._ids and header not in found)
        return sorted(set(found))

    def hash(self, patterns):
        """What changes when one of these files does."""
        lines = "".join(f"{path} {self.id(path)}\n" for path in self.files(patterns))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]
