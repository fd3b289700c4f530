"""The CPU kernels: C with OpenMP in `csrc/`, compiled at installation, called through ctypes.

The functions are those of `reference`, with the same bits, in one pass over memory. `orthogonalize` is the exception:
it is all matrix products, which torch's BLAS makes near the processor's peak, as C of our own would not.
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

from geotrain.kernels.payload_format import FORMATS, GRIDS, SCALE_SHIFT, Spec
from geotrain.kernels.steps import (
    AdamStep,
    Coefficients,
    OuterStep,
)

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _struct(name: str, *fields: tuple[Any, str]) -> type[ctypes.Structure]:
    """The C struct of that name: fields in its order, those of one type together."""
    members = [(field, kind) for kind, names in fields for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


_Record = _struct("record", (_int, "length kept low_bits lows_at highs_at values_at bytes"))
_CodecJob = _struct(
    "codec_job",
    (_pointer, "anchor values residual out squares payload"),
    (_long, "numel codes_offset"),
    (ctypes.c_uint64, "seed"),
    (_float, "decay inverse_level weight"),
    (_int, "values_are_bf16 stochastic accumulate format block scale_shift scale_bytes max_scale_bits threads"),
    (_Record * 2, "record"),
)
_OuterJob = _struct(
    "outer_job",
    (_pointer, "weights momentum accumulator delta"),
    (_long, "numel"),
    (_float, "keep gain from_momentum from_delta"),
    (_int, "moves_momentum threads"),
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
    """The compiled kernels, or None with a warning that says how to get them."""
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
    values: Tensor, payload: Tensor, spec: Spec, anchor: Tensor | None, residual: Tensor | None, seed: int
) -> Tensor:
    """As `reference.quantize`."""
    finite = _run(
        "quantize",
        **_tensors(anchor=anchor, values=values, residual=residual, payload=payload),
        **_layout(spec, values.numel()),
        seed=seed & (2**64 - 1),
        decay=spec.error_decay,
        inverse_level=1.0 / GRIDS[spec.format].max_level if spec.format in GRIDS else 0.0,
        values_are_bf16=values.dtype == torch.bfloat16,
        stochastic=spec.stochastic,
    )
    return torch.tensor(finite == 1)


def dequantize(payload: Tensor, out: Tensor, spec: Spec, weight: float | None, squares: Tensor | None = None) -> None:
    """As `reference.dequantize`."""
    payload = _aligned(payload)
    _run(
        "dequantize",
        **_tensors(payload=payload, out=out, squares=squares),
        **_layout(spec, out.numel()),
        weight=weight or 0.0,
        accumulate=weight is not None,
    )


def add_decoded(payload: Tensor, base: Tensor, out: Tensor, spec: Spec, weight: float) -> None:
    """As `reference.add_decoded`."""
    wide = base.to(torch.float32, copy=True)
    dequantize(payload, wide, spec, weight)
    out.copy_(wide)


def payload_ok(payload: Tensor, numel: int, spec: Spec) -> bool:
    """As `reference.payload_ok`."""
    payload = _aligned(payload)
    return _run("payload_ok", **_tensors(payload=payload), **_layout(spec, numel)) == 1


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor | None, accumulator: Tensor | None, step: OuterStep
) -> None:
    """As `reference.outer_update`."""
    vectors = _tensors(weights=weights, momentum=momentum, accumulator=accumulator, delta=delta)
    _run("outer_update", **vectors, numel=weights.numel(), **vars(step))


def merge(weights: Tensor, base: Tensor, incoming: Tensor, ledger: bool, alpha: float) -> None:
    """As `reference.merge`."""
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
    """As `reference.adam`."""
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
    """As `reference.rotate`."""
    names = ("sequence", "batch", "heads", "half"), ("by_token", "by_sample", "by_head")
    shape = dict(zip(names[0], (*x.shape[:3], x.shape[3] // 2), strict=True))
    strides = dict(zip(names[1], x.stride()[:3], strict=True))
    where = _tensors(input=x, output=out, cosine=cosine, sine=sine)
    _run("rotate", **where, **shape, **strides, inverse=inverse, is_bf16=x.dtype == torch.bfloat16)


def orthogonalize(matrices: Tensor, coefficients: Coefficients) -> Tensor:
    """As `reference.orthogonalize`, in fp32."""
    flip = matrices.shape[1] > matrices.shape[2]
    given = matrices.float()
    # First by the largest magnitude, so that no square over- or underflows; infinity becomes NaN here, and spreads.
    largest = torch.linalg.vector_norm(given, torch.inf, (1, 2), keepdim=True)
    x = given / torch.where(largest == 0, 1.0, largest)
    rows = torch.linalg.vector_norm(x, dim=2, keepdim=True)  # rows first: shorter sums round less
    x /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1.0)  # below 1 only where all is zero
    x = x.mT if flip else x  # BLAS reads either order: nothing is copied
    after = torch.empty_like(x)
    gram = x.new_empty(len(x), x.shape[1], x.shape[1])
    polynomial = torch.empty_like(gram)
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=after)
        x, after = after, x
    return (x.mT if flip else x).to(matrices.dtype)


def _run(name: str, **fields: Any) -> Any:
    loaded = library()
    if loaded is None:
        raise RuntimeError("geotrain.kernels: the CPU kernels are not built")
    job = _FUNCTIONS[name][0](**fields)
    if hasattr(job, "threads"):
        job.threads = torch.get_num_threads()
    return getattr(loaded, f"geotrain_{name}")(ctypes.byref(job))


def _tensors(**tensors: Tensor | None) -> dict[str, int | None]:
    """Addresses. The caller keeps the tensors alive until the kernel is done."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def _layout(spec: Spec, numel: int) -> dict[str, Any]:
    records = [_Record(), _Record()]
    if spec.format == "topk2" and numel:
        for i, length in enumerate((spec.block, numel % spec.block or spec.block)):
            records[i] = _Record(**vars(spec.record(length)))
    return {
        "numel": numel,
        "codes_offset": spec.codes_offset(numel) if spec.format in GRIDS else 0,
        "format": FORMATS.index(spec.format),
        "block": spec.block,
        "scale_shift": SCALE_SHIFT[spec.scale],
        "scale_bytes": spec.scale_bytes,
        "max_scale_bits": spec.max_scale_bits,
        "record": (_Record * 2)(*records),
    }


def _aligned(payload: Tensor) -> Tensor:
    """A payload may be a slice of a received buffer; C reads its fp32 and bf16 values in place."""
    return payload if payload.data_ptr() % 4 == 0 else payload.clone()
