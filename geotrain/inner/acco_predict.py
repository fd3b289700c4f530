"""How ACCO predicts the next weights apart from its commit: one procedure, with codes or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.inner.acco_lane import Lane
from geotrain.kernels.layout import Spec
from geotrain.sharing.acco_forms import CODE_BLOCK, Form

_SPEC = Spec("int4", block=CODE_BLOCK, scale="bf16")
_PIECE = 1 << 20  # elements coded at once: bounds the fp32 scratch; a multiple of CODE_BLOCK

# (gradients of the owned part [begin, end), in any type; their scale; begin; out) → out = what AdamW would give
Estimate = Callable[[Tensor, float, int, Tensor], None]


class Prediction:
    """A form's prediction. `take` reads the gradients at once; `travel` is the lane's job that follows it.

    The scratch is allocated once: codes of all shards, and a few fp32 pieces.
    """

    def __init__(self, form: Form, lane: Lane, shard: int, estimate: Estimate) -> None:
        self._form, self._lane, self._estimate = form, lane, estimate
        self._pieces = [(b, min(b + _PIECE, shard)) for b in range(0, shard, _PIECE)]
        self._code_bytes = sum(_SPEC.encoded_bytes(end - begin) for begin, end in self._pieces)
        self._codes: Tensor | None = None

    def take(self, weights: Tensor, gradients: Tensor, travelling: Tensor, count: int) -> None:
        """Put what is to travel into `travelling`; afterwards `gradients` may change. All flat, of one size.

        weights: committed. gradients: sum over this replica's `count` micro-batches.
        """
        if self._form.gathers == "full":
            travelling.copy_(gradients)
        elif self._form.reduces == "codes":
            outgoing = self._code_rows(travelling)[0]
            for row, part in zip(outgoing, gradients.view(self._lane.ranks, -1), strict=True):
                self._encode(part, row)
        else:
            self._encode_change(weights, self._lane.own(gradients), 1 / count)

    def travel(self, weights: Tensor, travelling: Tensor, count: int) -> None:
        """`travelling` becomes the predicted weights."""
        lane = self._lane
        if self._form.reduces != "nothing":
            (total,) = lane.sum(of_replicas=[count])
        if self._form.gathers == "full":
            lane.reduce_scatter(travelling)
            own = lane.own(travelling)
            self._estimate(own, 1 / total, 0, own)
            lane.all_gather(travelling)
            return
        if self._form.reduces == "codes":
            outgoing, incoming = self._code_rows(travelling)
            lane.exchange(incoming.view(-1), outgoing.view(-1))
            self._encode_change(weights, incoming, 1 / total)
        lane.all_gather(self._all_codes(weights).view(-1))
        for row, before, after in zip(
            self._all_codes(weights),
            weights.view(lane.ranks, -1),
            travelling.view(lane.ranks, -1),
            strict=True,
        ):
            self._decode_change(row, before, after)

    # -------------------------------------------------------------------------------------------------- codes

    def _all_codes(self, like: Tensor) -> Tensor:
        """[ranks, bytes]: each rank's coded change of its shard."""
        if self._codes is None:
            shape = (self._lane.ranks, self._code_bytes)
            self._codes = torch.empty(shape, dtype=torch.uint8, device=like.device)
        return self._codes

    def _code_rows(self, travelling: Tensor) -> Tensor:
        """[2, ranks, bytes]: room for the gradients' codes, out and in, in a buffer that is free until they came."""
        room = travelling.view(torch.uint8)[: 2 * self._lane.ranks * self._code_bytes]
        return room.view(2, self._lane.ranks, self._code_bytes)

    def _encode(self, values: Tensor, row: Tensor) -> None:
        at = 0
        for begin, end in self._pieces:
            payload = kernels.quantize(values[begin:end], _SPEC)[0]
            row[at : at + payload.numel()] = payload
            at += payload.numel()

    def _encode_change(self, weights: Tensor, gradients: Tensor, scale: float) -> None:
        """Code how the owned weights would change, from their gradients or from codes of them [ranks, bytes]."""
        own, row, at = self._lane.own(weights), self._all_codes(weights)[self._lane.rank], 0
        for begin, end in self._pieces:
            size = _SPEC.encoded_bytes(end - begin)
            if gradients.dtype == torch.uint8:
                summed = torch.zeros(end - begin, device=own.device)
                for codes in gradients:
                    kernels.dequantize(codes[at : at + size], summed, _SPEC, weight=1.0)
            else:
                summed = gradients[begin:end]
            before = own[begin:end].float()
            predicted = before.clone()  # padding must not change
            self._estimate(summed, scale, begin, predicted)
            row[at : at + size] = kernels.quantize(predicted, _SPEC, anchor=before)[0]
            at += size

    def _decode_change(self, row: Tensor, before: Tensor, after: Tensor) -> None:
        at = 0
        for begin, end in self._pieces:
            size = _SPEC.encoded_bytes(end - begin)
            weights = before[begin:end].to(torch.float32, copy=True)
            kernels.dequantize(row[at : at + size], weights, _SPEC, weight=-1.0)
            after[begin:end] = weights
            at += size
