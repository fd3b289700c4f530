"""A server's shards: vectors, and the arithmetic on them."""
