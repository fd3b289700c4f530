"""A server as a process."""
