"""Calls the CPU kernels: C with OpenMP in `csrc/`, compiled at installation, through ctypes.

Each function takes the arguments of the function of its name in `reference` and gives the same bits, in one pass over
memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from functools import cache
from pathlib import Path
from sysconfig import get_config_var
from typing import Any

import torch
from torch import Tensor

from geotrain.kernels.payload_format import FORMATS, GRIDS, PayloadFormat
from geotrain.kernels.steps import AdamStep, OuterStep

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _struct(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """Declare the C struct of that name: fields in its order, those of one type together."""
    members = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


_Record = _struct("record", (_int, "length kept low_bits lows_at highs_at values_at bytes"))
_CodecJob = _struct(
    "codec_job",
    (_pointer, "anchor values residual out squares payload"),
    (_long, "numel codes_offset residual_begin"),
    (ctypes.c_uint64, "seed"),
    (_float, "inverse_level weight"),
    (_int, "values_are_bf16 residual_is_bf16 moves_anchor accumulate"),
    (_int, "format block max_scale_bits threads"),
    (_Record * 2, "record"),
)
_OuterJob = _struct(
    "outer_job",
    (_pointer, "weights momentum accumulator delta"),
    (_long, "numel"),
    (ctypes.c_uint64, "seed"),
    (_float, "keep gain from_momentum from_delta"),
    (_int, "moves_momentum state_is_bf16 threads"),
)
_MergeJob = _struct(
    "merge_job",
    (_pointer, "weights base incoming"),
    (_long, "numel"),
    (_float, "keep alpha"),
    (_int, "ledger threads"),
)
_AdamStep = _struct("adam_step", (_float, "grad_scale beta1 rest1 beta2 rest2 root_scale eps rate shrink"))
_AdamJob = _struct(
    "adam_job",
    (_pointer, "weights exp_avg exp_avg_sq grad out"),
    (_long, "numel"),
    (_AdamStep, "step next"),
    (_int, "commit look_ahead grad_is_bf16 out_is_bf16 threads"),
)
_RotateJob = _struct(
    "rotate_job",
    (_pointer, "input output cosine sine"),
    (_long, "sequence batch heads half by_token by_sample by_head"),
    (_int, "inverse is_bf16 threads"),
)
_FUNCTIONS = {  # name: (job, result)
    "quantize": (_CodecJob, _int),
    "dequantize": (_CodecJob, None),
    "payload_ok": (_CodecJob, _int),
    "outer_update": (_OuterJob, None),
    "merge": (_MergeJob, None),
    "adam": (_AdamJob, None),
    "rotate": (_RotateJob, None),
}


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled kernels; None, with a warning that says how to get them, if they cannot be."""
    folder = Path(__file__).parent
    path = folder / f"_fast{get_config_var('EXT_SUFFIX')}"
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        _warn(f"cannot be loaded ({error})")
        return None
    loaded.geotrain_source.restype = ctypes.c_char_p
    sources = sorted((folder / "csrc").glob("*.[ch]"))  # a wheel carries none
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if sources and loaded.geotrain_source().decode() != digest:
        _warn("were built from other sources")
        return None
    for name, (job, result) in _FUNCTIONS.items():
        function = getattr(loaded, f"geotrain_{name}")
        function.argtypes, function.restype = [ctypes.POINTER(job)], result
    return loaded


def _warn(reason: str) -> None:
    warnings.warn(
        f"geotrain: the CPU kernels {reason}; torch does their work, several times slower. "
        "Install a C compiler with OpenMP (gcc) and reinstall: pip install -e .",
        RuntimeWarning,
        stacklevel=3,
    )


def quantize(
    values: Tensor, payload: Tensor, fmt: PayloadFormat, anchor: Tensor | None, residual: Tensor | None, seed: int,
    moves_anchor: bool = False,
) -> Tensor:  # fmt: skip
    """Encode v = (anchor −) values + residual."""
    finite = _run(
        "quantize",
        **_tensors(anchor=anchor, values=values, residual=residual, payload=payload),
        **_fields_of(fmt, values.numel()),
        seed=seed & (2**64 - 1),
        inverse_level=1.0 / GRIDS[fmt.name].max_level if fmt.name in GRIDS else 0.0,
        values_are_bf16=values.dtype == torch.bfloat16,
        residual_is_bf16=residual is not None and residual.dtype == torch.bfloat16,
        moves_anchor=moves_anchor,
    )
    return torch.tensor(finite == 1)


def dequantize(
    payload: Tensor, out: Tensor, fmt: PayloadFormat, weight: float | None, squares: Tensor | None = None
) -> None:
    """Decode into `out`, or onto it with a weight; `squares` gets the sums of squares."""
    payload = _aligned(payload)
    _run(
        "dequantize",
        **_tensors(payload=payload, out=out, squares=squares),
        **_fields_of(fmt, out.numel()),
        weight=weight or 0.0,
        accumulate=weight is not None,
    )


def payload_ok(payload: Tensor, numel: int, fmt: PayloadFormat) -> bool:
    """Check that all decoded values are finite, and all positions exist."""
    payload = _aligned(payload)
    return _run("payload_ok", **_tensors(payload=payload), **_fields_of(fmt, numel)) == 1


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor | None, accumulator: Tensor | None, step: OuterStep, seed: int
) -> None:
    """Apply one server update, in place."""
    vectors = _tensors(weights=weights, momentum=momentum, accumulator=accumulator, delta=delta)
    narrow = momentum is not None and momentum.dtype == torch.bfloat16
    _run("outer_update", **vectors, numel=weights.numel(), seed=seed, state_is_bf16=narrow, **vars(step))


def merge(weights: Tensor, base: Tensor, incoming: Tensor, ledger: bool, alpha: float) -> None:
    """Merge global weights into a region's, in place."""
    vectors = _tensors(weights=weights, base=base, incoming=incoming)
    _run("merge", **vectors, numel=weights.numel(), keep=1 - alpha, alpha=alpha, ledger=ledger)


def adam(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: AdamStep,
    look_ahead: AdamStep | None,
    commit: bool,
) -> None:
    """Step weights and moments by AdamW."""
    _run(
        "adam",
        **_tensors(weights=weights, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, out=out),
        numel=weights.numel(),
        step=_AdamStep(*step.coefficients),
        next=_AdamStep(*(look_ahead or step).coefficients),
        commit=commit,
        look_ahead=look_ahead is not None,
        grad_is_bf16=grad.dtype == torch.bfloat16,
        out_is_bf16=out is not None and out.dtype == torch.bfloat16,
    )


def rotate(x: Tensor, out: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> None:
    """Apply the rotary embedding."""
    names = ("sequence", "batch", "heads", "half"), ("by_token", "by_sample", "by_head")
    shape = dict(zip(names[0], (*x.shape[:3], x.shape[3] // 2), strict=True))
    strides = dict(zip(names[1], x.stride()[:3], strict=True))
    where = _tensors(input=x, output=out, cosine=cosine, sine=sine)
    _run("rotate", **where, **shape, **strides, inverse=inverse, is_bf16=x.dtype == torch.bfloat16)


def _run(name: str, **fields: Any) -> Any:
    """Call the C function with a job of these fields."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("geotrain.kernels: the CPU kernels are not built")
    job = _FUNCTIONS[name][0](threads=torch.get_num_threads(), **fields)
    return getattr(loaded, f"geotrain_{name}")(ctypes.byref(job))


def _tensors(**tensors: Tensor | None) -> dict[str, int | None]:
    """Take the tensors' addresses. The caller keeps the tensors alive until the kernel is done."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def _fields_of(fmt: PayloadFormat, numel: int) -> dict[str, Any]:
    """Fill in a codec job's fields for a payload of `numel` elements."""
    records = [_Record(), _Record()]
    if fmt.name == "topk2" and numel:
        for i, length in enumerate((fmt.block, numel % fmt.block or fmt.block)):
            records[i] = _Record(**vars(fmt.record(length)))
    return {
        "numel": numel,
        "codes_offset": fmt.codes_offset(numel) if fmt.name in GRIDS else 0,
        "format": FORMATS.index(fmt.name),
        "block": fmt.block,
        "max_scale_bits": fmt.max_scale_bits,
        "record": (_Record * 2)(*records),
    }


def _aligned(payload: Tensor) -> Tensor:
    """Copy a payload that is an unaligned slice of a received buffer: C reads its fp32 and bf16 values in place."""
    return payload if payload.data_ptr() % 4 == 0 else payload.clone()
