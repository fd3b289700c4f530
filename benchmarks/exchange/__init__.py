"""Measures what an exchange costs a worker, stage by stage, and how that grows with the model, the workers and the
regions."""
