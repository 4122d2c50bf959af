"""Layers that several networks share."""
