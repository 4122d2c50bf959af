"""Foreign checkpoints, in our names."""
