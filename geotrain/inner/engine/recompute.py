"""Computes a micro-batch beside training, to be compared with what other ranks compute of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.model.router_bias import biased_routers
from geotrain.inner.zero.optimizer import OverlappedZero1

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Result(NamedTuple):
    """A result in short. bits: sum of its elements' bits as integers, which one flipped bit changes. norm: L2."""

    bits: int
    norm: float


def bits_of(tensor: Tensor) -> Tensor:
    """Sum the bits of a tensor's elements as integers: int64 []."""
    return tensor.detach().contiguous().view(WORDS[tensor.element_size()]).sum(dtype=torch.int64)


def weight_bits(engine: GeoEngine) -> int:
    """Sum the bits of all that this rank computes with."""
    if isinstance(engine.optimizer, OverlappedZero1):
        engine.optimizer.wait_for_weights()
    biases = (router.expert_bias for _, router in biased_routers(engine.module))
    return int(torch.stack([bits_of(weight) for weight in (*engine.module.parameters(), *biases)]).sum())


def computed(engine: GeoEngine, tokens: Tensor) -> tuple[Result, Result]:
    """Compute a micro-batch: what this rank's pipeline stage gives out, and the gradients of what it holds.

    Nothing of training is touched: neither its gradients nor what it counts. In FP8 there are no gradients: backward
    would move the scales. Every rank of a replica must call it.
    """
    parts: tuple[list[tuple[Tensor, Tensor]], ...] = [], []
    routers = [router for _, router in biased_routers(engine.module)]
    counts = [router.local_tokens_per_expert.clone() for router in routers]
    forward_only = engine.module.config.fp8 is not None

    def add(part: int, tensor: Tensor) -> None:
        norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)
        parts[part].append((bits_of(tensor), norm.square()))

    def take(leaf: Tensor) -> None:
        assert leaf.grad is not None
        add(1, leaf.grad)
        leaf.grad = None

    hook = engine.module.register_forward_hook(lambda module, inputs, output: add(0, output))
    with torch.set_grad_enabled(not forward_only), own_leaves(engine.module.train(), take):
        engine._run_schedule([tokens], forward_only)
    hook.remove()
    for router, before in zip(routers, counts, strict=True):
        router.local_tokens_per_expert.copy_(before)
    of_output, of_gradients = (
        Result(int(torch.stack([b for b, _ in part]).sum()), float(torch.stack([n for _, n in part]).sum().sqrt()))
        if part
        else Result(0, 0.0)
        for part in parts
    )
    return of_output, of_gradients


@contextmanager
def own_leaves(model: nn.Module, take: Callable[[Tensor], None]) -> Iterator[None]:
    """Let a model compute with other leaves of autograd over the same weights, so that no hook of training sees a
    gradient. take: called with each of these leaves that has got one."""
    held = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    for parameters, name, parameter in held:
        if parameter not in leaves:
            leaf = leaves[parameter] = nn.Parameter(parameter.data, parameter.requires_grad)
            leaf.__dict__.update(parameter.__dict__)
            if parameter.requires_grad:
                leaf.register_post_accumulate_grad_hook(take)
        parameters[name] = leaves[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in held:
            parameters[name] = parameter
