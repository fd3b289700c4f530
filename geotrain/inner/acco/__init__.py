"""ACCO: communication behind the next window's compute."""
