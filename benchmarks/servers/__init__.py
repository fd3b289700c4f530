"""Real servers at half a billion parameters: memory, the way of an update, snapshots, recovery."""
