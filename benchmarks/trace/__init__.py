"""A step of the engine on "meta": what it would launch, move and wait for on a GPU, without one."""
