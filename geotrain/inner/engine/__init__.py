"""The DeepSpeed engine of one rank."""
