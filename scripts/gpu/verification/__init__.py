"""What `scripts/gpu/verify` is made of: a file for each section, and what sections share."""
