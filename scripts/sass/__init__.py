"""What scripts/check-sass is made of: kernels' machine code, read and counted."""
