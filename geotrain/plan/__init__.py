"""Cost model and placement search."""
