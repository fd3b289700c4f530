"""Size, speed and error of every codec. The last line printed is one JSON object keyed by the codec's name.

bits_per_parameter                  of a large payload
encode_vs_memcpy, decode_vs_memcpy  speed over a memory copy that touches the same bytes, alternating in one run:
                                    encoding reads anchor, weights and residual, writes residual and payload;
                                    decoding checks and reads the payload and writes fp32 (accumulating also reads);
                                    decode_measured also sums the squares of what it wrote
relative_rmse                       |decoded − delta| / |delta| of a real delta, without error feedback
triton                              registers and spilled bytes a thread, compiled ahead of time for each target
*_vs_copy_bandwidth                 on a GPU: the same as *_vs_memcpy, against a copy on the device
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks import real_delta
from benchmarks.common import alternate, command_line, ratio, report, triton_resources, units_by_ending
from geotrain.config import codec_config
from geotrain.kernels import triton_ops
from geotrain.outer.codec import Codec, make_codec

CONFIGS = {
    **{name: codec_config(name) for name in ("fp32", "bf16", "int8", "int4", "e3m0")},
    "topk2": codec_config("topk2", block=1024, density=0.1),
}


def speed(codec: Codec, numel: int, rounds: int, device: str) -> dict[str, float]:
    """Ratios to a copy that touches the same bytes, and the copy's own GB/s."""
    anchor = torch.randn(numel, device=device)
    weights, residual = anchor + 1e-3 * torch.randn(numel, device=device), torch.zeros(numel, device=device)
    out = torch.zeros(numel, device=device)
    payload = codec.encode(weights, anchor=anchor, residual=residual).payload
    touched = {
        "encode": 16 * numel + len(payload),
        "decode": 4 * numel + len(payload),
        "decode_measured": 4 * numel + len(payload),
        "accumulate": 8 * numel + len(payload),
    }
    on_host = device == "cpu"
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(weights, anchor=anchor, residual=residual),
        "decode": lambda: codec.decode(payload, numel, out=out, checked=not on_host),
        "decode_measured": lambda: codec.decode_measured(payload, out),
        "accumulate": lambda: codec.decode_accumulate(payload, out, 0.5, checked=not on_host),
    }
    for name, size in touched.items():
        source, target = (torch.ones(size // 2, dtype=torch.uint8, device=device) for _ in range(2))
        work[f"copy_{name}"] = lambda source=source, target=target: target.copy_(source)
    times = alternate(work, rounds, device)
    suffix = "vs_memcpy" if on_host else "vs_copy_bandwidth"
    result: dict[str, float] = {}
    for name in touched:
        result |= ratio(f"{name}_{suffix}", times[f"copy_{name}"], times[name])
    result[f"{'memcpy' if on_host else 'copy'}_gb_s"] = touched["encode"] / median(times["copy_encode"]) / 1e9
    result[f"encode_{'cpu' if on_host else 'gpu'}_gb_s"] = touched["encode"] / median(times["encode"]) / 1e9
    return result


def relative_rmse(codec: Codec, delta: dict[str, Tensor]) -> float:
    """Each parameter is coded by itself, as a worker does."""
    error = whole = 0.0
    for name, values in delta.items():
        decoded = codec.decode(codec.encode(values, what=name).payload, values.numel())
        error += float((decoded - values.flatten()).double().square().sum())
        whole += float(values.double().square().sum())
    return (error / whole) ** 0.5


def resources(codec: Codec, targets: int | None) -> dict[str, dict[str, dict[str, int]]]:
    """Resources that the kernels of a large, even tensor take on each of the first targets; None: on all."""
    spec = codec.spec
    values, anchor, residual = (torch.zeros(16 * spec.block) for _ in range(3))
    payload = torch.zeros(spec.encoded_bytes(values.numel()), dtype=torch.uint8)
    taken = {
        "quantize": triton_resources(
            lambda: triton_ops.quantize(values, payload, spec, anchor, residual, 0), targets
        ),
        "dequantize": triton_resources(lambda: triton_ops.dequantize(payload, residual, spec, 0.5), targets),
    }
    return {target: {name: by_target[target] for name, by_target in taken.items()} for target in taken["quantize"]}


def main() -> None:
    parser = command_line(__doc__, quick={"numel": 1 << 18, "rounds": 3, "targets": 1})
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the timed tensors")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--targets", type=int, help="GPUs that the kernels are compiled for; default: all; 0: none")
    options = parser.parse_args()

    delta = real_delta.train()
    results: dict[str, dict] = {}
    for name, config in CONFIGS.items():
        codec = make_codec(config)
        result: dict = {"bits_per_parameter": 8 * codec.encoded_bytes(options.numel) / options.numel}
        result |= speed(codec, options.numel, options.rounds, "cpu")
        if torch.cuda.is_available():
            result |= speed(codec, options.numel * 8, options.rounds, "cuda")
        result["relative_rmse"] = relative_rmse(codec, delta)
        if options.targets != 0:
            result["triton"] = resources(codec, options.targets)
        results[name] = result
        speeds = [f"{part}_vs_memcpy" for part in ("encode", "decode", "accumulate")]
        shown = ("bits_per_parameter", *speeds, "relative_rmse")
        print(f"{name:6}", *(f"{key} {result[key]:.4g}" for key in shown), flush=True)
    endings = {"bits_per_parameter": "bit", "gb_s": "GB/s", "registers": "registers", "spilled": "bytes"}
    report("codec", results, options, units_by_ending(endings, "ratio"))


if __name__ == "__main__":
    main()
