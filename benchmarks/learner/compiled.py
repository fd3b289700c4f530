"""The small byte model's loss, gradient (`lm.c`) and optimizers (`optimizers.c`) in C, called through ctypes.

They equal what `model.py` and `optimizers.py` state in torch, within fp32 rounding, and are several times faster,
because small torch operations cost more than their arithmetic. Larger matrices are multiplied by torch's own BLAS
where that is the faster one (`products`). The C files are compiled on first use, into build/.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks import ROOT
from geotrain.config import Architecture

SOURCES = tuple(Path(__file__).with_name(name) for name in ("lm.c", "optimizers.c", "matrices.h"))
CACHE = ROOT / "build" / "learner"
COMPILE_S = 300.0  # at most
# Sums may be reordered and contracted: results need not be bit for bit those of another machine.
FLAGS = (
    "-O3", "-g0", "-fPIC", "-shared", "-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros",
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
LIBRARY = 128  # size of matrices from which BLAS is faster than the products compiled here, on an Intel Xeon
ROWS = 128  # tokens that are computed at once: few enough for their activations to stay in a core's cache
_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_long, ctypes.c_float


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ("vocab", "hidden", "layers", "heads", "ffn", "length")),
        ("eps", _float),
        ("cosine", _pointer),
        ("sine", _pointer),
        ("sgemm", _pointer),
    ]


class AdamWStep(NamedTuple):
    """Coefficients of a step of AdamW, from its bias corrections on:

    m = β1·m + (1−β1)·g ;  v = β2·v + (1−β2)·g² ;  x −= shrink·decays·x ;  x −= rate · m / (√(scale2·v) + ε)
    with g the gradient, at most `clip` long; keep1, keep2 are the β.
    """

    clip: float
    keep1: float
    keep2: float
    eps: float
    rate: float
    scale2: float
    shrink: float


class MuonStep(NamedTuple):
    """Coefficients of a step of Muon: m = keep·m + (1−keep)·g ;  u = mix·m + (1−mix)·g ;
    x −= shrink·x + lr·√max(rows, columns)·O(u), where O is `optimizers.orthogonalized` with a, b, c."""

    keep: float
    mix: float
    lr: float
    shrink: float
    eps: float
    a: float
    b: float
    c: float
    iterations: int


class _AdamW(ctypes.Structure):
    _fields_ = [(name, _float) for name in AdamWStep._fields]


class _Muon(ctypes.Structure):
    _fields_ = [*((name, _float) for name in MuonStep._fields[:-1]), ("iterations", _int)]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions. None, with a warning, where there is no C compiler: torch then does their work."""
    try:
        loaded = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"the small model is not compiled ({error}); torch does its work, several times slower. Install gcc, or "
            "name a C compiler in CC.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    model = ctypes.POINTER(_Model)
    loaded.geotrain_lm.argtypes = [model, _pointer, _pointer, _pointer, _int, _pointer, _int]
    loaded.geotrain_lm.restype = ctypes.c_double
    loaded.geotrain_lm_workspace.argtypes, loaded.geotrain_lm_workspace.restype = [model, _int], _long
    adam = [_long, *[_pointer] * 5, ctypes.POINTER(_AdamW)]
    loaded.geotrain_lm_adamw.argtypes, loaded.geotrain_lm_adamw.restype = adam, None
    loaded.geotrain_lm_muon.argtypes = [*adam, ctypes.POINTER(_Muon), _long, _pointer, _pointer, _pointer]
    loaded.geotrain_lm_muon.restype = None
    loaded.geotrain_lm_muon_workspace.argtypes, loaded.geotrain_lm_muon_workspace.restype = [_long, _long], _long
    return loaded


def _built() -> Path:
    """The shared library, compiled on first use. Its name holds a digest of what it is made from, so that another
    source or other flags make another file. Raises OSError without a compiler, SubprocessError when it fails."""
    compiler = os.environ.get("CC", "cc")
    made_from = repr((compiler, FLAGS, [source.read_text() for source in SOURCES]))
    path = CACHE / f"lm-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Processes may compile at the same time: each into a file of its own, which then takes its place whole.
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / path.name
            compiled = [str(source) for source in SOURCES if source.suffix == ".c"]
            command = [*shlex.split(compiler), *FLAGS, *compiled, "-o", str(made), "-lm"]
            subprocess.run(command, check=True, timeout=COMPILE_S)
            made.replace(path)
    return path


@cache
def processor() -> tuple[str, frozenset[str]]:
    """Its maker, and what it can do, as Linux tells; elsewhere nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "", frozenset()
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return told.get("vendor_id", ""), frozenset(told.get("flags", "").split())


def products(size: int) -> Literal["compiled", "library"]:
    """What multiplies matrices of that size, their least one: the functions compiled here, or torch's BLAS.

    The processor decides and no trial, which might come out otherwise the next time: sums would differ in their last
    bits, and a run would not be the same run. On a core of AMD's Zen 5, five million parameters, the compiled ones
    make 170 GFLOP/s, MKL 93; on an Intel Xeon MKL is the faster.
    """
    maker, abilities = processor()
    ours = size < LIBRARY or (maker == "AuthenticAMD" and "avx512f" in abilities)
    return "compiled" if ours else "library"


@cache
def torch_sgemm() -> int | None:
    """The address of Fortran's sgemm (with 32-bit integers) in torch's library, or None if this torch exports
    none."""
    found = list((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
    try:
        return ctypes.cast(ctypes.CDLL(str(found[0])).sgemm_, _pointer).value
    except (IndexError, OSError, AttributeError):
        return None


class _Workspaces(threading.local):
    """One scratch vector of each size for a thread. Its models compute one after another, so they can share it, and
    what is shared stays in the cache."""

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
        self.sgemm = torch_sgemm() if products(a.hidden_size) == "library" else None

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


Vectors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # weights, gradient, m, v, decays: fp32, of one size


def adamw(loaded: ctypes.CDLL, vectors: Vectors, step: AdamWStep) -> None:
    """In place on weights, m and v."""
    loaded.geotrain_lm_adamw(vectors[0].numel(), *(_address(v) for v in vectors), ctypes.byref(_AdamW(*step)))


def muon(loaded: ctypes.CDLL, vectors: Vectors, adam: AdamWStep, step: MuonStep, places: Tensor) -> None:
    """In place on weights, m and v. places: int64 [matrices, 3], each matrix's first element, rows and columns, in
    order; elsewhere AdamW's coefficients count."""
    assert places.dtype == torch.int64 and places.is_contiguous()
    shapes = places[:, 1:].tolist()
    sgemm = torch_sgemm() if products(min(min(shape) for shape in shapes)) == "library" else None
    floats = max(loaded.geotrain_lm_muon_workspace(*shape) for shape in shapes)
    loaded.geotrain_lm_muon(
        vectors[0].numel(),
        *(_address(v) for v in vectors),
        ctypes.byref(_AdamW(*adam)),
        ctypes.byref(_Muon(*step)),
        len(places),
        places.data_ptr(),
        sgemm,
        _workspaces.of(floats).data_ptr(),
    )


def _address(vector: Tensor) -> int:
    assert vector.dtype == torch.float32 and vector.is_contiguous() and vector.device.type == "cpu"
    return vector.data_ptr()
