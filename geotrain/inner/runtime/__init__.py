"""Process groups, devices, and the shards that a rank owns."""
