"""Keeps a server's state on disks: journal, snapshots, recovery."""
