"""The compiled part of the small byte model (`lm.c`), called through ctypes: the same loss, gradient and AdamW as
`lm.py` states in torch, within fp32 rounding, faster: no operation has an overhead of its own. A larger model's
matrices are multiplied by the BLAS that torch brings."""

from __future__ import annotations

import ctypes
import threading
import warnings
from functools import cache
from pathlib import Path
from sysconfig import get_config_var

import torch
from torch import Tensor

from geotrain.canonical import Architecture

LIBRARY = 128  # hidden size from which BLAS is faster than the products compiled here (a core of an Intel Xeon)
ROWS = 128  # tokens of a chunk, so that its activations stay in a core's cache
_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_long, ctypes.c_float


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ("vocab", "hidden", "layers", "heads", "ffn", "length")),
        ("eps", _float),
        ("cosine", _pointer),
        ("sine", _pointer),
        ("sgemm", _pointer),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """None, with a warning, where it was not built at installation: torch then does its work."""
    path = Path(__file__).parent / f"_lm{get_config_var('EXT_SUFFIX')}"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(
            f"geotrain: the simulator's small model is not compiled ({error}); torch does its work, several times "
            "slower. Install gcc and reinstall: pip install -e .",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    model = ctypes.POINTER(_Model)
    loaded.geotrain_lm.argtypes = [model, _pointer, _pointer, _pointer, _int, _pointer, _int]
    loaded.geotrain_lm.restype = ctypes.c_double
    loaded.geotrain_lm_workspace.argtypes, loaded.geotrain_lm_workspace.restype = [model, _int], _long
    loaded.geotrain_lm_adamw.argtypes = [_long, *[_pointer] * 5, *[_float] * 7]
    loaded.geotrain_lm_adamw.restype = None
    return loaded


@cache
def torch_sgemm() -> int | None:
    """Address of BLAS's single-precision product, Fortran's, with 32-bit integers. None: this torch exports none."""
    found = list((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    try:
        return ctypes.cast(ctypes.CDLL(str(found[0])).sgemm_, _pointer).value
    except (IndexError, OSError, AttributeError):
        return None


class _Workspaces(threading.local):
    """A thread's, by their size: its models compute one after another, and one workspace stays in the cache."""

    def __init__(self) -> None:
        self.by_floats: dict[int, Tensor] = {}

    def of(self, floats: int) -> Tensor:
        if floats not in self.by_floats:
            self.by_floats[floats] = torch.empty(floats)
        return self.by_floats[floats]


_workspaces = _Workspaces()


class CompiledLM:
    """angles: cosine and sine of the rotary embedding, fp32 [positions, head size / 2]."""

    def __init__(self, loaded: ctypes.CDLL, a: Architecture, angles: tuple[Tensor, Tensor]) -> None:
        self.loaded, self.a = loaded, a
        self.angles = tuple(t.float().contiguous() for t in angles)
        self.sgemm = torch_sgemm() if a.hidden_size >= LIBRARY else None

    def loss(self, weights: Tensor, tokens: Tensor, gradient: Tensor | None = None) -> float:
        """Mean nats a token; tokens int64 [batch, length + 1], weights fp32. `gradient` is overwritten."""
        a, length = self.a, tokens.shape[1] - 1
        assert tokens.dtype == torch.int64 and length <= a.max_positions and int(tokens.min()) >= 0
        assert int(tokens.max()) < a.vocab_size
        tokens = tokens.contiguous()
        model = _Model(
            a.vocab_size, a.hidden_size, a.layers, a.heads, a.ffn_size, length, a.norm_eps,
            *(t.data_ptr() for t in self.angles), self.sgemm,
        )  # fmt: skip
        room = max(1, ROWS // length)
        floats = self.loaded.geotrain_lm_workspace(ctypes.byref(model), room)
        return self.loaded.geotrain_lm(
            ctypes.byref(model),
            _address(weights),
            None if gradient is None else _address(gradient),
            tokens.data_ptr(),
            len(tokens),
            _workspaces.of(floats + 16).data_ptr(),
            room,
        )


def adamw(
    loaded: ctypes.CDLL,
    vectors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    clip: float,
    betas: tuple[float, float],
    eps: float,
    rate: float,
    scale: float,
    shrink: float,
) -> None:
    """vectors: weights, gradient, m, v, decays, of one size. In place on weights, m and v.

    m = β1·m + (1−β1)·g ;  v = β2·v + (1−β2)·g² ;  x −= shrink·decays·x ;  x −= rate · m / (√(scale·v) + ε)
    with g the gradient, at most `clip` long.
    """
    loaded.geotrain_lm_adamw(
        vectors[0].numel(), *(_address(v) for v in vectors), clip, *betas, eps, rate, scale, shrink
    )


def _address(vector: Tensor) -> int:
    assert vector.dtype == torch.float32 and vector.is_contiguous() and vector.device.type == "cpu"
    return vector.data_ptr()
