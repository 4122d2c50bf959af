"""Masks: run lengths, geometry, losses, resizing, suppression, panoptic segments."""
