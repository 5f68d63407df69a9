"""The modules of scripts/estimate-step: they estimate the time of a training step on an H100 by counting. Nothing runs."""
