"""The command `trainer`, which `python -m trainer` is too."""
import os
import signal
import sys

if not __package__:
    # Called by its path: this folder is no place to import from, but the one around it.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from trainer import _trainer


def main():
    # The program has its own way to be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_trainer.main(["trainer", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
