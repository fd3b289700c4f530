"""Text to tokens, and tokens to batches by lease."""
