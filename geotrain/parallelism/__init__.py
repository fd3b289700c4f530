"""How the ranks of a worker share the model: what is allowed, which rank holds what, what it needs. Plain data."""
