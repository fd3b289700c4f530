"""Frames, calls, links."""
