"""Bricks that several networks share."""
