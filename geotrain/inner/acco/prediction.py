"""Predicts ACCO's next weights apart from its commit: one procedure for all forms, with 4-bit codes or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.inner.acco.communication_thread import CommunicationThread
from geotrain.kernels.payload_format import PayloadFormat
from geotrain.parallelism.acco_forms import CODE_BLOCK, Form

FORMAT = PayloadFormat("int4", block=CODE_BLOCK, scale="bf16")

# Writes to the last argument the weights that the optimizer's step would give, and changes nothing else. Arguments:
# gradients of a part of the owned shard, of any dtype; their scale; where the part begins; out.
Estimate = Callable[[Tensor, float, int, Tensor], None]


class WeightPrediction:
    """Predicts weights in one form, in two halves.

    `prepare` runs on the thread that computes, because it reads gradients that compute then changes. `communicate`
    follows as a job of the communication thread. The codes of all shards have memory that is allocated once; beyond
    that, the scratch is a few fp32 chunks.
    """

    def __init__(
        self, form: Form, communication: CommunicationThread, chunks: Sequence[Sequence[slice]], estimate: Estimate
    ) -> None:
        """Lay out the codes. chunks: of each rank's shard, what is coded at once; they bound the fp32 scratch."""
        self._form, self._communication, self._estimate = form, communication, estimate
        self._chunks: list[list[tuple[slice, slice]]] = []  # by rank: elements of its shard; bytes of their codes
        for of_rank in chunks:
            *starts, end = accumulate((FORMAT.encoded_bytes(p.stop - p.start) for p in of_rank), initial=0)
            coded = [slice(*span) for span in pairwise((*starts, end))]
            self._chunks.append(list(zip(of_rank, coded, strict=True)))
        self._code_bytes = max(of_rank[-1][1].stop for of_rank in self._chunks)  # of the longest row
        self._codes: Tensor | None = None

    def prepare(self, weights: Tensor, gradients: Tensor, in_flight: Tensor, count: int) -> None:
        """Read from `gradients` all that `communicate` needs; afterwards they may change.

        All tensors are flat and of one size. weights: the committed ones. gradients: sums over this replica's `count`
        micro-batches. in_flight: the buffer to send from.
        """
        if self._form.gathers == "full":
            in_flight.copy_(gradients)
        elif self._form.reduces == "codes":
            outgoing = self._code_rows(in_flight)[0]
            parts = gradients.view(self._communication.ranks, -1)
            for row, part, chunks in zip(outgoing, parts, self._chunks, strict=True):
                for elements, coded in chunks:
                    kernels.quantize(part[elements], FORMAT, payload=row[coded])
        else:
            self._encode_change(weights, self._communication.own(gradients), 1 / count)

    def communicate(self, weights: Tensor, in_flight: Tensor, count: int) -> None:
        """Let `in_flight` become the predicted weights, of all shards. The arguments are those of `prepare`."""
        communication, ranks = self._communication, self._communication.ranks
        if self._form.reduces != "nothing":
            (total,) = communication.sum(of_replicas=[count])
        if self._form.gathers == "full":
            communication.reduce_scatter(in_flight)
            own = communication.own(in_flight)
            self._estimate(own, 1 / total, 0, own)
            communication.all_gather(in_flight)
            return
        if self._form.reduces == "codes":
            outgoing, incoming = self._code_rows(in_flight)
            communication.exchange(incoming.view(-1), outgoing.view(-1))
            self._encode_change(weights, incoming, 1 / total)
        communication.all_gather(self._all_codes(weights).view(-1))
        # Every rank, the owner included, applies the codes to the committed weights: so all ranks get the same bits.
        rows = (self._all_codes(weights), weights.view(ranks, -1), in_flight.view(ranks, -1), self._chunks)
        for row, before, after, chunks in zip(*rows, strict=True):
            for elements, coded in chunks:
                # A code holds a delta, before − predicted, as everywhere; hence the minus.
                kernels.add_decoded(row[coded], before[elements], after[elements], FORMAT, weight=-1.0)

    # -------------------------------------------------------------------------------------------------- codes

    def _all_codes(self, like: Tensor) -> Tensor:
        """The buffer for each rank's coded change of its shard, uint8 [ranks, bytes]."""
        if self._codes is None:
            shape = (self._communication.ranks, self._code_bytes)
            self._codes = torch.empty(shape, dtype=torch.uint8, device=like.device)
        return self._codes

    def _code_rows(self, in_flight: Tensor) -> Tensor:
        """Two buffers for codes of gradients, outgoing and incoming, uint8 [2, ranks, bytes].

        They use the memory of `in_flight`, which is free until the predicted weights are written to it.
        """
        room = in_flight.view(torch.uint8)[: 2 * self._communication.ranks * self._code_bytes]
        return room.view(2, self._communication.ranks, self._code_bytes)

    def _encode_change(self, weights: Tensor, gradients: Tensor, scale: float) -> None:
        """Encode how the optimizer would change the owned weights.

        weights: all committed ones, flat. gradients: of the owned shard, or codes of them from every rank, uint8
        [ranks, bytes]. scale: factor for the gradients.
        """
        own, row = self._communication.own(weights), self._all_codes(weights)[self._communication.rank]
        for elements, coded in self._chunks[self._communication.rank]:
            part = gradients[:, coded] if gradients.dtype == torch.uint8 else gradients[elements]
            self._encode_chunk(own[elements], part, scale, elements.start, row[coded])

    def _encode_chunk(self, weights: Tensor, gradients: Tensor, scale: float, begin: int, out: Tensor) -> None:
        """Encode one chunk of the shard, which begins at `begin`.

        A function of its own so that its temporaries are freed between chunks
        (`geotrain.parallelism.acco_forms.scratch_bytes` counts them).
        """
        before = weights.float()
        if gradients.dtype == torch.uint8:
            summed = torch.empty_like(before)
            for rank, codes in enumerate(gradients):
                kernels.dequantize(codes, summed, FORMAT, weight=1.0 if rank else None)
        else:
            summed = gradients
        predicted = before.clone()  # `_estimate` leaves out padding, whose change must be zero
        self._estimate(summed, scale, begin, predicted)
        kernels.quantize(predicted, FORMAT, anchor=before, payload=out)
