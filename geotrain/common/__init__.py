"""Offers what any other package may use."""
