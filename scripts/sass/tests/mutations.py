"""Tests check-sass on kernels that were made worse on purpose: changed copies of the sources, compiled by NVRTC.

  python3 scripts/sass/tests/mutations.py      a minute, without a GPU; the compiler comes from PyPI if CUDA_HOME has none
"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from sass import nvrtc

TARGET, FORWARD, QUERIES = 90, "flash_forward_64_bf16", "flash_backward_queries_64_bf16"


def check(*arguments):
    return subprocess.run([ROOT / "scripts/check-sass", *map(str, arguments)], capture_output=True, text=True)


class Mutations(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for path in (ROOT / "kernels").glob("*.cu*"):
            shutil.copy(path, self.folder)
        # Of attention, heads of 64 in bf16 alone: the others take the compiler most of a minute.
        source = self.folder / "flash_attention.cu"
        text = source.read_text()
        source.write_text(text[:text.index("#define OF_ONE_TYPE")] + "OF_ONE_WIDTH(bf16, 64, 64_bf16);\n")

    def mutate(self, name, before, after):
        path = self.folder / name
        text = path.read_text()
        self.assertIn(before, text, f"{name} has changed: this test is to change with it")
        path.write_text(text.replace(before, after, 1))

    def compiled(self, source):
        path = self.folder / f"{source}.cubin"
        path.write_bytes(nvrtc.compile(self.folder / f"{source}.cu", TARGET))
        return path

    def judged(self, source, *kernels):
        chosen = [word for name in kernels for word in ("--kernel", name)]
        return check(self.compiled(source), "--target", TARGET, *chosen)

    def test_sources_as_they_are_pass_even_from_within_another_file(self):
        cubin = self.compiled("flash_attention")
        binary = self.folder / "binary"
        binary.write_bytes(b"\x7fELF" + bytes(100) + cubin.read_bytes() + b"text")
        for path in (cubin, self.folder, binary):
            ended = check(path, "--target", TARGET, "--kernel", FORWARD, "--kernel", QUERIES)
            self.assertEqual((ended.returncode, ended.stderr), (0, ""), ended.stdout)
            self.assertNotIn("better", ended.stdout, "the budget has these very figures")

    def test_copies_that_are_no_longer_unrolled_fail(self):
        self.mutate("tile.cuh", "#pragma unroll\n        for (int row = 0; row < ROWS",
                    "#pragma unroll 1\n        for (int row = 0; row < ROWS")
        ended = self.judged("flash_attention", FORWARD)
        self.assertEqual(ended.returncode, 1, ended.stdout)
        self.assertIn(f"worse: {FORWARD} for sm_90: inner loops of the loop: 0 before, 2 now", ended.stdout)
        self.assertIn(f"worse: {FORWARD} for sm_90: LDGSTS of the loop: 8 before, 2 now", ended.stdout)

    def test_a_loop_that_starts_at_the_thread_fails(self):
        # It looks unrolled but is not, so it is unknown how often it runs.
        self.mutate("tile.cuh", "for (int row = 0; row < ROWS; row += STEP, from += stride) {\n            copy_async",
                    "for (int row = own; row < ROWS; row += STEP, from += stride) {\n            copy_async")
        ended = self.judged("flash_attention", FORWARD)
        self.assertEqual(ended.returncode, 1, ended.stdout)
        self.assertIn(f"worse: {FORWARD} for sm_90: instructions per HMMA of the loop", ended.stdout)

    def test_registers_that_do_not_suffice_fail(self):
        self.mutate("flash_attention.cu", "return (64 << 10) / 256 / threads;", "return (64 << 10) / 128 / threads;")
        ended = self.judged("flash_attention", FORWARD)
        self.assertEqual(ended.returncode, 1, ended.stdout)
        self.assertRegex(ended.stdout, f"worse: {FORWARD} for sm_90: accesses of local memory: 0 before, [0-9]+ now")

    def test_rows_that_are_loaded_one_by_one_fail(self):
        self.mutate("columns.cuh", "constexpr int ROWS_AHEAD = 4;", "constexpr int ROWS_AHEAD = 1;")
        ended = self.judged("elementwise", "bias_backward_bf16")
        self.assertEqual(ended.returncode, 1, ended.stdout)
        self.assertRegex(ended.stdout, "worse: bias_backward_bf16 for sm_90: wide loads in flight of loop 1: 4 before, 1 now")

    def test_a_kernel_that_is_missing_fails(self):
        ended = self.judged("rms_norm", "rms_norm_bf16", FORWARD)
        self.assertEqual(ended.returncode, 1)
        self.assertIn(f"worse: {FORWARD} for sm_90 is in the budget, and in none of the files", ended.stdout)

    def test_code_by_another_compiler_is_not_judged(self):
        known = json.loads((ROOT / "kernels/sass-budget.json").read_text())
        other = self.folder / "budget.json"
        other.write_text(json.dumps(known | {"compiler": "12.8"}))
        ended = check(self.compiled("rms_norm"), "--budget", other, "--target", TARGET, "--kernel", "rms_norm_bf16")
        self.assertEqual((ended.returncode, ended.stdout), (3, ""))
        self.assertIn("by the compiler of CUDA 12.9, and the budget by that of 12.8", ended.stderr)

    def test_figures_are_taken_over_by_a_blessing(self):
        page, other = self.folder / "README.md", self.folder / "budget.json"
        page.write_text("<!-- sass -->\n<!-- /sass -->\n")
        paths = self.compiled("rms_norm"), "--readme", page, "--budget", other
        self.assertEqual(check(*paths, "--bless").returncode, 0)
        self.assertIn("| `rms_norm_backward_bf16` |", page.read_text())
        self.assertEqual(check(*paths).returncode, 0)
        page.write_text(page.read_text().replace("| `rms_norm_bf16` |", "| `rms_norm_bf16` | 1"))
        ended = check(*paths)
        self.assertEqual(ended.returncode, 1)
        self.assertIn("is not that of", ended.stderr)

    def test_files_without_machine_code_are_refused(self):
        ended = check(ROOT / "README.md")
        self.assertEqual(ended.returncode, 2)
        self.assertIn("there is no machine code of these kernels", ended.stderr)


if __name__ == "__main__":
    unittest.main()
