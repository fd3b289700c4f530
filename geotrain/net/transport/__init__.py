"""Carries messages over links: frames, calls, TLS, clients."""
