"""The outer loop's sockets and disk."""
