"""The trainer: configuration, loop, checkpoints, log."""
