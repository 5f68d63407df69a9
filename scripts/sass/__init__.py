"""The modules of scripts/check-sass: they read kernels' machine code and count in it."""
