"""What scripts/estimate-step is made of: the time of a training step on an H100, by counting. Nothing runs."""
