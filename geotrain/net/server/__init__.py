"""Runs servers and their shards as processes."""
