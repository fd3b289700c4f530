"""The parallel layout of a worker, as plain data: what is allowed, which rank holds what, how much memory it
needs."""
