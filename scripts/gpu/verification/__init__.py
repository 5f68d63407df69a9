"""The modules of `scripts/gpu/verify`: a file for each section, and shared code."""
