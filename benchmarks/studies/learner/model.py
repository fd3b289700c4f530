"""A byte-level language model so small that one core trains sixteen of them; its loss and gradient are C (`lm.c`).

It has Llama's parameters under their canonical names, all in one flat vector. Small torch operations cost more than
their arithmetic, so C is 3.4 times as fast (`benchmarks.studies` has the figure). The tests state the model in torch,
and hold the C to it within fp32 rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from geotrain.config import Architecture
from geotrain.parameters.parameter_map import canonical_parameters

SOURCES = tuple(Path(__file__).with_name(name) for name in ("lm.c", "matrices.h"))
CACHE = ROOT / "build" / "learner"
COMPILE_S = 300.0  # at most
# Sums may be reordered and contracted: results need not be bit for bit those of another machine.
FLAGS = (
    "-O3", "-g0", "-fPIC", "-shared", "-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros",
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
ROWS = 128  # tokens that are computed at once: few enough for their activations to stay in a core's cache


def small_architecture(hidden: int, layers: int, heads: int, ffn: int, positions: int) -> Architecture:
    """A Llama over bytes with these sizes; `positions` is the longest sequence."""
    return Architecture(
        "llama", 256, hidden, ffn, layers, heads, heads, hidden // heads, 1e-5, 10000.0, rope_scaling=(),
        max_positions=positions, tied_embeddings=True, qk_norm=False, qkv_bias=False, sliding_window=None,
        init_std=0.02,
    )  # fmt: skip


class SmallLM:
    """Weights and gradient are two flat fp32 vectors; `masters` names the weights' parts (views)."""

    def __init__(self, architecture: Architecture, start: Tensor, gradient: Tensor | None = None) -> None:
        """Copy the weights from `start`. gradient: the vector to write it to, if models that step one after another
        share one."""
        self.__setstate__((architecture, start.clone(), torch.zeros_like(start) if gradient is None else gradient))

    def __getstate__(self) -> tuple[Any, ...]:
        return self.a, self.flat, self.gradient

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Make all that is not the two vectors anew around them."""
        self.a, self.flat, self.gradient = a, flat, _ = state
        self.parameters = canonical_parameters(a)
        parts = flat.split([p.numel for p in self.parameters])
        self.masters = {p.name: part for p, part in zip(self.parameters, parts, strict=True)}
        self._angles = rotary_angles(a)

    def backward(self, tokens: Tensor) -> float:
        """Fill `gradient` and return the loss: mean nats a byte of tokens, int64 [batch, length + 1]."""
        return self._loss(self.flat, tokens, self.gradient)

    def evaluate(self, weights: Tensor, tokens: Tensor) -> float:
        """The loss of other weights (1-D, fp32) on tokens."""
        return self._loss(weights, tokens, None)

    def _loss(self, weights: Tensor, tokens: Tensor, gradient: Tensor | None) -> float:
        a, length = self.a, tokens.shape[1] - 1
        assert tokens.dtype == torch.int64 and length <= a.max_positions and int(tokens.min()) >= 0
        assert int(tokens.max()) < a.vocab_size
        model = _Model(
            a.vocab_size, a.hidden_size, a.layers, a.heads, a.ffn_size, length, a.norm_eps,
            *(t.data_ptr() for t in self._angles),
        )  # fmt: skip
        loaded, tokens, room = library(), tokens.contiguous(), max(1, ROWS // length)
        floats = loaded.geotrain_lm_workspace(ctypes.byref(model), room)
        with _denormals_as_zero():
            return loaded.geotrain_lm(
                ctypes.byref(model),
                _address(weights),
                None if gradient is None else _address(gradient),
                tokens.data_ptr(),
                len(tokens),
                _workspace(floats + 16).data_ptr(),
                room,
            )


def rotary_angles(a: Architecture) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding: fp32 [positions, head size / 2]."""
    half = a.head_dim // 2
    frequencies = a.rope_theta ** (-torch.arange(half) / half)
    angles = torch.arange(a.max_positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("vocab", "hidden", "layers", "heads", "ffn", "length")),
        ("eps", ctypes.c_float),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
    ]


@cache
def library() -> ctypes.CDLL:
    """The compiled functions, with their types."""
    loaded, model, pointer = ctypes.CDLL(str(built())), ctypes.POINTER(_Model), ctypes.c_void_p
    loaded.geotrain_lm.argtypes = [model, pointer, pointer, pointer, ctypes.c_int, pointer, ctypes.c_int]
    loaded.geotrain_lm.restype = ctypes.c_double
    loaded.geotrain_lm_workspace.argtypes = [model, ctypes.c_int]
    loaded.geotrain_lm_workspace.restype = ctypes.c_long
    return loaded


def built() -> Path:
    """The shared library, compiled on first use. Its name holds a digest of what it is made from, so that another
    source or other flags make another file. Raises OSError without a C compiler (gcc, or what CC names),
    SubprocessError when it fails."""
    compiler = os.environ.get("CC", "cc")
    made_from = repr((compiler, FLAGS, [source.read_text() for source in SOURCES]))
    path = CACHE / f"lm-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Processes may compile at the same time: each into a file of its own, which then takes its place whole.
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / path.name
            command = [*shlex.split(compiler), *FLAGS, str(SOURCES[0]), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, timeout=COMPILE_S)
            made.replace(path)
    return path


@cache
def _workspace(floats: int) -> Tensor:
    """One scratch vector of each size: models compute one after another, and what is shared stays in the cache."""
    return torch.empty(floats)


def _address(vector: Tensor) -> int:
    assert vector.dtype == torch.float32 and vector.is_contiguous() and vector.device.type == "cpu"
    return vector.data_ptr()


@contextmanager
def _denormals_as_zero() -> Iterator[None]:
    """Treat numbers below 1.2e-38 as zero within the block. They take a core a hundred times as long as others and
    change no result that matters; at high learning rates attention is full of them, and steps took twice as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
