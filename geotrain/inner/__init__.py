"""One worker: DeepSpeed trains a Megatron-core model. Nothing here knows of regions."""
