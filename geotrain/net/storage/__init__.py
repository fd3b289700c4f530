"""Journal, snapshots, recovery."""
