"""What is started: the training script, a region, a world of processes, emulated links."""
