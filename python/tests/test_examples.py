"""Tests of the installed wheel: the examples that need no other package."""
import pathlib
import re
import subprocess
import sys
import unittest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples/python"


class Examples(unittest.TestCase):
    def test_the_reward_of_a_policy_rises(self):
        for seed in range(3):
            said = subprocess.check_output([sys.executable, EXAMPLES / "grpo.py", str(seed)], text=True)
            rewards = [float(reward) for reward in re.findall(r"reward ([0-9.]+)", said)]
            self.assertEqual(len(rewards), 11)
            self.assertGreater(rewards[-1], rewards[0] + 0.25, said)


if __name__ == "__main__":
    unittest.main()
