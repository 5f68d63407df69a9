"""`python -m trainer` is `trainer`."""
import os
import sys

from trainer import binary

os.execv(binary(), ["trainer", *sys.argv[1:]])
