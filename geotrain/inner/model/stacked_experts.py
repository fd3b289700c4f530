"""Linear layers of one expert whose weights are inputs × outputs, as those of experts that are stacked in one
parameter, in the places of Megatron-core's. Between them tensor ranks divide what is in the middle of an MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geotrain.inner.runtime import platform


class StackedColumns(nn.Module):
    """A tensor rank's columns of the first product, with a bias."""

    def __init__(self, inputs: int, outputs: int, config: Any, **_: Any) -> None:
        super().__init__()
        self.ranks = config.expert_tensor_parallel_size
        made: dict[str, Any] = {"device": platform.device(), "dtype": config.params_dtype}
        self.weight, self.bias = (nn.Parameter(torch.empty(s, **made)) for s in self.shapes(inputs, outputs))

    def shapes(self, inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (inputs, outputs // self.ranks), (outputs // self.ranks,)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product, and the bias, which Megatron-core adds."""
        return x @ self.weight, self.bias


class StackedRows(StackedColumns):
    """A tensor rank's rows of the second product, of which it gives a part. All give parts of the bias, too."""

    def shapes(self, inputs: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (inputs // self.ranks, outputs), (outputs,)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.bias / self.ranks
