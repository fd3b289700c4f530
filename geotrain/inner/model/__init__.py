"""The Megatron-core model of one rank."""
