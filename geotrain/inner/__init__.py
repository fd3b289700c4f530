"""Inside one worker: Megatron-core model, DeepSpeed engine. Knows nothing of regions."""
