"""A server's state machine: members, leases, updates."""
