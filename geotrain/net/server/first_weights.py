"""The run's initial weights, which every machine can make by itself: the global server begins with them, and a region
that joins before the first update takes them from its own seed or files, and not over its link."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from geotrain.config import ConfigError, RunConfig
from geotrain.net.storage.remote_snapshots import beside
from geotrain.net.transport import rpc
from geotrain.net.transport.made_weights import MadeWeights
from geotrain.outer.downlink import WeightsSender
from geotrain.outer.messages import Answer, ChunkWeights
from geotrain.parameters.chunks import Cut, cut
from geotrain.parameters.dcp import start_weights
from geotrain.parameters.hf_checkpoint import HFCheckpointError
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_file import read_values
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice

log = logging.getLogger(__name__)


def initial_weights(
    run: RunConfig, parameter_map: ParameterMap, fragments: Collection[int] | None = None
) -> dict[int, Tensor]:
    """Make the run's initial weights, from its seed, its Hugging Face checkpoint or its file of any model's
    parameters: fragment → 1-D fp32 vector. fragments: only these.

    Raises ConfigError.
    """
    wanted = range(len(parameter_map.fragments)) if fragments is None else fragments
    vectors = {number: torch.empty(parameter_map.fragments[number].numel) for number in wanted}
    chunks = [chunk for number in wanted for chunk in parameter_map.chunks_of[number]]
    _fill(run, parameter_map, {c.index: vectors[c.fragment][c.start : c.start + c.numel] for c in chunks})
    return vectors


def first_answers(run: RunConfig, parameter_map: ParameterMap, fragments: Collection[int]) -> dict[int, MadeWeights]:
    """Make what the global server answers to a region's join before its first update, of these fragments. Empty:
    there are none, or what the run begins with is not on this machine."""
    if not fragments:
        return {}
    try:
        made = initial_weights(run, parameter_map, fragments)
    except (ConfigError, OSError) as error:
        log.info("the first weights come from the global server: %s", error)
        return {}
    sender, found = WeightsSender(run.outer.down), dict[int, MadeWeights]()
    for number in fragments:  # each goes when it is encoded, so that the weights are not in memory twice
        vector = made.pop(number)
        encoded = [
            sender.encode(chunk.index, 0, vector[chunk.start : chunk.start + chunk.numel])
            for chunk in parameter_map.chunks_of[number]
        ]
        found[number] = MadeWeights.of(encoded)
    return found


class FirstDigests:
    """Digests a server's answers to joins beside its other work, for members that have made them by themselves."""

    def __init__(self) -> None:
        # Member and fragment → the weights whose digest it did not wait for, and that digest.
        self._begun: dict[tuple[str, int], tuple[tuple[ChunkWeights, ...], asyncio.Future[str]]] = {}

    async def reply(self, member: str, answer: Answer, digest: str, until_s: float) -> rpc.Same | rpc.NotYet | Answer:
        """Choose the reply to a member that has made an answer with this digest. NotYet: the server's digest takes
        longer than until `until_s` of the loop's clock, and goes on until the member asks again."""
        key = member, answer.fragment
        weights, digesting = self._begun.pop(key, ((), None))
        if digesting is None or weights != answer.weights:
            weights = answer.weights
            digesting = asyncio.ensure_future(beside(lambda: MadeWeights.of(weights).digest))
        self._begun[key] = weights, digesting
        await asyncio.wait({digesting}, timeout=max(0.0, until_s - asyncio.get_running_loop().time()))
        if not digesting.done():
            return rpc.NotYet()
        self._begun.pop(key, None)
        return rpc.Same(answer.incarnation) if digesting.result() == digest else answer


def _fill(run: RunConfig, parameter_map: ParameterMap, chunks: Mapping[int, Tensor]) -> None:
    """Write the initial weights into the vectors of these chunks. Raises ConfigError."""
    places: defaultdict[str, list[Cut]] = defaultdict(list)
    for parameter in parameter_map.parameters:
        for part in cut(parameter_map, [StridedSlice(0, parameter.numel, parameter=parameter.name)]):
            if part.chunk in chunks:
                places[parameter.name].append(part)
    for name, tensor in _tensors(run, parameter_map, places):
        for part in places[name]:
            (there,) = part.slices
            chunks[part.chunk][there.start : there.start + there.numel].copy_(
                tensor.reshape(-1)[part.begin : part.end]
            )


def _tensors(run: RunConfig, parameter_map: ParameterMap, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the initial values of these parameters, of their shapes. Raises ConfigError."""
    if run.model.weights is None and run.model.init_from is None:
        yield from ((p.name, initial_tensor(p, run.seed)) for p in parameter_map.parameters if p.name in names)
    else:
        yield from ((name, tensor) for name, tensor in given_weights(run) if name in names)


def given_weights(run: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Read the initial weights from the files that `model.weights` or `model.init_from` names, one at a time; none
    where neither does. Raises ConfigError, also where a weight is not finite."""
    made: Iterable[tuple[str, Tensor]] = ()
    if run.model.weights is not None:
        key, made = f"model.weights: {run.model.weights}", read_values(Path(run.model.weights))
    elif run.model.init_from is not None:
        key, made = f"model.init_from: {run.model.init_from}", start_weights(run)
    try:
        for name, tensor in made:
            if not bool(tensor.isfinite().all()):
                raise ConfigError(f"{key}: {name} holds infinities or NaN; a run cannot begin with it")
            yield name, tensor
    except HFCheckpointError as error:
        raise ConfigError(f"model.init_from: {error}") from None
