"""The rotary embedding against Megatron-core's own, forward and backward."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from geotrain.inner.model import rotary

SHAPE = (6, 2, 3, 10)  # tokens, samples, heads, elements


def both(t: torch.Tensor, freqs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(rotated, gradient) by ours and by Megatron-core's, for a gradient whose samples lie before its tokens."""
    gradient = torch.randn(SHAPE[1], SHAPE[0], *SHAPE[2:], dtype=torch.float32).transpose(0, 1).to(t.dtype)
    found = []
    for function in (rotary.rotated, rotary._of_megatron):
        x = t.clone().requires_grad_()
        wide = torch.cat((x, torch.zeros_like(x)), dim=-1)[..., : SHAPE[3]]  # as a part of something wider
        out = function(wide, freqs)
        out.backward(gradient)
        assert x.grad is not None
        found.append((out.detach(), x.grad))
    return found


def angles(size: int = SHAPE[3]) -> torch.Tensor:
    half = torch.outer(torch.arange(float(SHAPE[0])), torch.rand(size // 2))
    return torch.cat((half, half), dim=-1)[:, None, None]


def test_in_bf16_it_is_nearer_to_the_truth() -> None:
    t, freqs = torch.randn(SHAPE).bfloat16(), angles()
    ours, theirs = both(t, freqs)
    truth = rotary._of_megatron(t.double(), freqs.double())
    off = [(found[0].double() - truth).abs().mean() for found in (ours, theirs)]
    assert ours[0].dtype == torch.bfloat16 and off[0] < 0.7 * off[1]
    assert torch.equal(ours[0], truth.float().bfloat16())


@pytest.mark.parametrize(
    "settings", [{"mscale": 1.5}, {"multi_latent_attention": True}, {"rotary_interleaved": True}]
)
def test_other_forms_are_megatrons(settings: Any) -> None:
    t, freqs = torch.randn(SHAPE), angles()
    ours, theirs = (function(t, freqs, **settings) for function in (rotary.rotated, rotary._of_megatron))
    assert torch.equal(ours, theirs)


def test_where_a_part_of_a_head_is_rotated_it_is_megatrons() -> None:
    t, freqs = torch.randn(SHAPE), angles(4)
    assert torch.equal(rotary.rotated(t, freqs), rotary._of_megatron(t, freqs))


def test_the_model_uses_it_where_megatrons_takes_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    from geotrain.inner.model import replaced

    name = "_apply_rotary_pos_emb_bshd"
    assert getattr(rope_utils, name) is rotary.rotated
    monkeypatch.setattr(rope_utils, name, lambda t, freqs, rotary_interleaved, pairs: t)
    says = f"Megatron-core .*rope_utils.{name} takes t, .*, pairs; GeoTrain knows 0.16 to 0.19, where it takes"
    with pytest.raises(ImportError, match=says):
        importlib.reload(replaced)
