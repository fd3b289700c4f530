"""Our own fusions against Megatron-core's unfused operations: the same numbers and the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from geotrain import fusions
from geotrain.config import ParallelConfig
from tests.support.inner_worlds import QWEN_2, deepspeed_block, run_world, start, stop, train


def unfused_rotation(t: Tensor, freqs: Tensor, mscale: float) -> Tensor:
    """As Megatron-core writes it (`rope_utils`)."""
    r = freqs.shape[-1]
    turned, rest = t[..., :r], t[..., r:]
    cos, sin = ((function(freqs) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
    x1, x2 = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-x2, x1), dim=-1) * sin, rest), dim=-1)


@pytest.mark.parametrize(("width", "mscale"), [(16, 1.0), (8, 1.0), (16, 1.3)])
def test_the_rotation(width: int, mscale: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    packed = torch.randn(6, 2, 3, 48, generator=drawn, dtype=torch.float64, requires_grad=True)
    query = packed[..., 16:32]  # a piece of what one product gives, as in the model
    freqs = torch.randn(6, 1, 1, width // 2, generator=drawn, dtype=torch.float64).repeat(1, 1, 1, 2)
    weight = torch.randn(6, 2, 3, 16, generator=drawn, dtype=torch.float64)
    ours, theirs = fusions.rotate(query, freqs, mscale=mscale), unfused_rotation(query, freqs, mscale)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad((out * weight).sum(), packed)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().sum() > 1
    torch.autograd.gradcheck(lambda q: fusions.rotate(q, freqs[:, :, :, :width], mscale=mscale), query)


def both() -> list[Any]:
    """Curves of two steps: fused as the model is built, and with Megatron-core's own operations put back."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.language_module.language_module import LanguageModule

    curves = []
    for fused in (True, False):
        engine = start(QWEN_2, ParallelConfig(), deepspeed_block(0))
        assert rope_utils._apply_rotary_pos_emb_bshd is fusions.rotate
        assert engine.module.compute_language_model_loss is fusions.token_losses
        if not fused:
            rope_utils._apply_rotary_pos_emb_bshd = lambda t, f, mscale=1.0, **_: unfused_rotation(t, f, mscale)
            del engine.module.compute_language_model_loss
            assert engine.module.compute_language_model_loss.__func__ is LanguageModule.compute_language_model_loss
        curves.append(train(engine, range(3)))
        stop(engine)
    return curves


def test_a_model_trains_as_without_them() -> None:
    ((fused, unfused),) = run_world(1, both)
    assert fused == [pytest.approx(step, rel=1e-5) for step in unfused]
