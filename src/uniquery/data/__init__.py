"""Data sets: read, checked, augmented, batched, drawn."""
