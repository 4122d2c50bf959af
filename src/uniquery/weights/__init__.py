"""Model files in and out: our own, and those of other projects."""
