"""The CPU kernels: C with OpenMP in `csrc/`, compiled at installation, called through ctypes.

The functions are those of `reference` and `reference_update`, with the same bits, in one pass over memory.
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

from geotrain.kernels.layout import FORMATS, GRIDS, SCALE_SHIFT, Spec
from geotrain.kernels.steps import AdamStep, OuterStep

_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Record(ctypes.Structure):
    _fields_ = [(name, _int) for name in ("length", "kept", "low_bits", "lows_at", "highs_at", "values_at", "bytes")]


_BLOCKS = [(name, _int) for name in ("format", "block", "scale_shift", "scale_bytes", "max_scale_bits")]


class _QuantizeJob(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("anchor", "values", "residual", "payload")),
        *((name, _long) for name in ("numel", "codes_offset")),
        ("seed", ctypes.c_uint64),
        *((name, _float) for name in ("decay", "inverse_level")),
        ("values_are_bf16", _int),
        *_BLOCKS,
        ("stochastic", _int),
        ("threads", _int),
        ("record", _Record * 2),
    ]


class _DequantizeJob(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("payload", "out")),
        *((name, _long) for name in ("numel", "codes_offset")),
        ("weight", _float),
        ("accumulate", _int),
        *_BLOCKS,
        ("threads", _int),
        ("record", _Record * 2),
    ]


class _OuterJob(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weights", "momentum", "accumulator", "delta")),
        ("numel", _long),
        *((name, _float) for name in ("keep", "gain", "from_momentum", "from_delta")),
        *((name, _int) for name in ("moves_momentum", "threads")),
    ]


class _MergeJob(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weights", "base", "incoming", "sent")),
        ("numel", _long),
        *((name, _float) for name in ("keep", "alpha")),
        ("threads", _int),
    ]


class _AdamStep(ctypes.Structure):
    _fields_ = [
        (name, _float)
        for name in ("grad_scale", "beta1", "rest1", "beta2", "rest2", "root_scale", "eps", "rate", "shrink")
    ]


class _AdamJob(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weights", "exp_avg", "exp_avg_sq", "grad", "out")),
        ("numel", _long),
        ("step", _AdamStep),
        ("next", _AdamStep),
        *((name, _int) for name in ("commit", "look_ahead", "grad_is_bf16", "out_is_bf16", "threads")),
    ]


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
    sources = sorted((folder / "csrc").glob("*.[ch]"))  # not in a wheel
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if sources and loaded.geotrain_source().decode() != digest:
        _warn("were built from other sources")
        return None
    loaded.geotrain_quantize.argtypes = [ctypes.POINTER(_QuantizeJob), ctypes.POINTER(ctypes.c_double)]
    loaded.geotrain_quantize.restype = _int
    loaded.geotrain_payload_ok.argtypes = [ctypes.POINTER(_DequantizeJob)]
    loaded.geotrain_payload_ok.restype = _int
    for name, job in (
        ("dequantize", _DequantizeJob),
        ("outer_update", _OuterJob),
        ("merge", _MergeJob),
        ("adam", _AdamJob),
    ):
        function = getattr(loaded, f"geotrain_{name}")
        function.argtypes, function.restype = [ctypes.POINTER(job)], None
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
) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    job = _QuantizeJob(
        anchor=_at(anchor),
        values=_at(values),
        residual=_at(residual),
        payload=_at(payload),
        seed=seed & (2**64 - 1),
        decay=spec.error_decay,
        inverse_level=1.0 / GRIDS[spec.format].max_level if spec.format in GRIDS else 0.0,
        values_are_bf16=values.dtype == torch.bfloat16,
        stochastic=spec.stochastic,
        **_blocks(spec, values.numel()),
    )
    sum_of_squares = ctypes.c_double()
    finite = _loaded().geotrain_quantize(ctypes.byref(job), ctypes.byref(sum_of_squares))
    if finite < 0:
        raise MemoryError("geotrain.kernels: no memory for the sums of a quantization")
    return torch.tensor(sum_of_squares.value, dtype=torch.float64), torch.tensor(finite == 1)


def dequantize(payload: Tensor, out: Tensor, spec: Spec, weight: float | None) -> None:
    """As `reference.dequantize`."""
    payload = _aligned(payload)
    job = _DequantizeJob(
        payload=_at(payload),
        out=_at(out),
        weight=0.0 if weight is None else weight,
        accumulate=weight is not None,
        **_blocks(spec, out.numel()),
    )
    _loaded().geotrain_dequantize(ctypes.byref(job))


def payload_ok(payload: Tensor, numel: int, spec: Spec) -> Tensor:
    """As `reference.payload_ok`."""
    payload = _aligned(payload)
    job = _DequantizeJob(payload=_at(payload), **_blocks(spec, numel))
    return torch.tensor(_loaded().geotrain_payload_ok(ctypes.byref(job)) == 1)


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor, accumulator: Tensor | None, step: OuterStep
) -> None:
    """As `reference_update.outer_update`."""
    job = _OuterJob(
        weights=_at(weights),
        momentum=_at(momentum),
        accumulator=_at(accumulator),
        delta=_at(delta),
        numel=weights.numel(),
        keep=step.keep,
        gain=step.gain,
        from_momentum=step.from_momentum,
        from_delta=step.from_delta,
        moves_momentum=step.moves_momentum,
        threads=torch.get_num_threads(),
    )
    _loaded().geotrain_outer_update(ctypes.byref(job))


def merge(weights: Tensor, base: Tensor, incoming: Tensor, sent: Tensor | None, alpha: float) -> None:
    """As `reference_update.merge`."""
    job = _MergeJob(
        weights=_at(weights),
        base=_at(base),
        incoming=_at(incoming),
        sent=_at(sent),
        numel=weights.numel(),
        keep=1 - alpha,
        alpha=alpha,
        threads=torch.get_num_threads(),
    )
    _loaded().geotrain_merge(ctypes.byref(job))


def adam_step(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    out: Tensor | None,
    look_ahead: AdamStep | None,
) -> None:
    """As `reference_update.adam_step`."""
    _adam(weights, exp_avg, exp_avg_sq, grad, step, out, look_ahead, commit=True)


def adam_estimate(
    weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, step: AdamStep, out: Tensor
) -> None:
    """As `reference_update.adam_estimate`."""
    _adam(weights, exp_avg, exp_avg_sq, grad, step, out, None, commit=False)


def _adam(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    out: Tensor | None,
    look_ahead: AdamStep | None,
    commit: bool,
) -> None:
    job = _AdamJob(
        weights=_at(weights),
        exp_avg=_at(exp_avg),
        exp_avg_sq=_at(exp_avg_sq),
        grad=_at(grad),
        out=_at(out),
        numel=weights.numel(),
        step=_adam_coefficients(step),
        next=_adam_coefficients(look_ahead or step),
        commit=commit,
        look_ahead=look_ahead is not None and out is not None,
        grad_is_bf16=grad.dtype == torch.bfloat16,
        out_is_bf16=out is not None and out.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    _loaded().geotrain_adam(ctypes.byref(job))


def _adam_coefficients(step: AdamStep) -> _AdamStep:
    return _AdamStep(
        grad_scale=step.grad_scale,
        beta1=step.beta1,
        rest1=1 - step.beta1,
        beta2=step.beta2,
        rest2=1 - step.beta2,
        root_scale=step.root_scale,
        eps=step.eps,
        rate=step.rate,
        shrink=step.shrink,
    )


def _blocks(spec: Spec, numel: int) -> dict[str, Any]:
    dense = spec.format in GRIDS
    records = [_Record(), _Record()]
    if spec.format == "topk2" and numel:
        for i, length in enumerate((spec.block, numel % spec.block or spec.block)):
            r = spec.record(length)
            records[i] = _Record(r.length, r.kept, r.low_bits, r.lows_at, r.highs_at, r.values_at, r.bytes)
    return {
        "numel": numel,
        "codes_offset": spec.codes_offset(numel) if dense else 0,
        "format": FORMATS.index(spec.format),
        "block": spec.block,
        "scale_shift": SCALE_SHIFT[spec.scale],
        "scale_bytes": spec.scale_bytes,
        "max_scale_bits": spec.max_scale_bits,
        "threads": torch.get_num_threads(),
        "record": (_Record * 2)(*records),
    }


def _loaded() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise RuntimeError("geotrain.kernels: the CPU kernels are not built")
    return loaded


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(payload: Tensor) -> Tensor:
    """A payload may be a slice of a received buffer; C reads its fp32 and bf16 values in place."""
    return payload if payload.data_ptr() % 4 == 0 else payload.clone()
