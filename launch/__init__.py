"""Starts the processes of a run on this and other machines, watches them, and shows how the run goes."""
