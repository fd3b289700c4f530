"""Starts the ranks of a worker: a launcher a file, found by the name that the cluster file gives."""
