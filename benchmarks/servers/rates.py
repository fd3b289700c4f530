"""Write what `python -m benchmarks.servers` measures into the product; and the table of docs/operations.md."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from pprint import pformat
from typing import Any

import geotrain.plan.model.server_rates as product
from benchmarks import ROOT
from benchmarks.common import hardware
from benchmarks.servers.world import OUTER
from benchmarks.small_runs import deepspeed_block, llama
from benchmarks.studies.claims.report import replace_block, table
from geotrain.common.files import whole_file
from geotrain.config import OuterConfig, RunConfig, parse
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.model.server_rates import ServerRates
from geotrain.plan.model.servers import ServerNeeds, place_of, server_needs, update_s

PAGE = ROOT / "docs/operations.md"
BYTES = 2  # of a parameter in the benchmark's updates, and in answers, which are bf16
UPDATE = ("frames_in", "journal_write", "journal_flush", "decode_and_norm", "rule", "answer", "frames_out")
OF_BYTE = ("frames_in", "journal_write", "journal_flush", "frames_out")
OF_PARAMETER = ("decode_and_norm", "rule", "answer", "up_encode", "merge", "mirror")

WORKERS, REGIONS, GBPS, HOST_BYTES = 2, (4, 16), 10.0, 1e12
# Llama 3's width, layers, heads and inner width.
LARGE = {"8 B": (4096, 32, 32, 14336), "70 B": (8192, 80, 64, 28672), "405 B": (16384, 126, 128, 53248)}
HEADER = (
    "model",
    "server",
    "memory",
    "bytes a parameter",
    "hosts",
    "disk",
    "an update",
    "a send",
    "link",
    "recovery",
    "memory with mirrors on the disk",
    "bytes a parameter",
    "longer by",
)


def of(stages: dict[str, float], recovery_s_per_gb: float, note: str) -> ServerRates:
    """stages: ns of a parameter, as `benchmarks.servers` gives them."""
    of_parameter = {stage: stages[stage] for stage in OF_PARAMETER}
    of_byte = {stage: stages[stage] / BYTES for stage in OF_BYTE}
    # What goes in and out, each of BYTES, takes the time that no stage does.
    in_stages = sum(stages[stage] for stage in UPDATE) - min(stages["decode_and_norm"], stages["journal_flush"])
    beyond = stages["end_to_end"] - in_stages
    of_byte["between"] = max(0.0, beyond) / (2 * BYTES)
    of_byte["tls"] = max(0.0, stages["encrypted"] - stages["small"]) / (2 * BYTES)
    return ServerRates(hardware(), note, of_parameter, of_byte, recovery_s_per_gb)


def simulated_ns(counted: ServerRates, encrypted: bool) -> float:
    """Nanoseconds of a parameter of a worker's update, as plan, dry-run and simulate count them with these rates."""
    place = place_of("region", parse(OuterConfig, OUTER, "outer"), WORKERS)
    return 1e9 * update_s(place, BYTES, 1, BYTES, counted.over(encrypted))


def renew(figures: dict[str, Any], note: str) -> ServerRates:
    """Write what was measured into the product and the page; returns it."""
    rates = rounded(of(figures["ns_per_parameter"], figures["recovery_s_per_gb"], note))
    path = Path(str(product.__file__))
    head, begin, _ = path.read_text().partition("# fmt: off\n")
    with whole_file(path) as file:
        file.write(f"{head}{begin}{literal(rates)}")
    replace_block(PAGE, "servers", markdown(rates))
    return rates


def literal(rates: ServerRates) -> str:
    """Format rates for the product's source."""
    return f"MEASURED = {pformat(rates, width=110, sort_dicts=False)}\n"


def rounded(rates: ServerRates) -> ServerRates:
    """The rates in three digits."""

    def short(numbers: dict[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in numbers.items()}

    recovery = float(f"{rates.recovery_s_per_gb:.3g}")
    return replace(
        rates, of_parameter=short(rates.of_parameter), of_byte=short(rates.of_byte), recovery_s_per_gb=recovery
    )


def run_of(model: str) -> RunConfig:
    config = llama(*LARGE[model], 128256, 4096, num_key_value_heads=8, tie_word_embeddings=False)
    block = {
        "name": "large", "folder": "large", "outer": OUTER | {"fragments": {"layers_per_fragment": 2}},
        "model": {"config": config},
        "data": {"train": "data", "sequence_length": 4096, "train_samples": 1 << 24},
        "deepspeed": deepspeed_block(1024, 1, 1e-4, bf16={"enabled": True}),
    }  # fmt: skip
    return parse(RunConfig, block, model)


def markdown(rates: ServerRates = product.MEASURED) -> str:
    """The table. It follows from the formulas and the rates alone, so a test compares it with the page."""
    rows = []
    for model in LARGE:
        run = run_of(model)
        parameter_map = parameter_map_of(run)
        places = [place_of("region", run.outer, WORKERS), *(place_of("global", run.outer, n) for n in REGIONS)]
        for place in places:
            needs, on_disk = (
                server_needs(each, run.outer, parameter_map, run.checkpoint.keep, rates)
                for each in (place, replace(place, on_disk=True))
            )
            rows.append(_row(model, place.members, needs, on_disk, parameter_map.numel))
    return f"{table(rows, HEADER)}\n\nRates: {rates.hardware}; {rates.note}."


def _row(model: str, members: int, needs: ServerNeeds, on_disk: ServerNeeds, numel: int) -> list[str]:
    region = needs.role == "region"
    link_s = 8 * needs.up_bytes / GBPS / 1e9
    return [
        model,
        f"a region's, {members} workers" if region else f"global, {members} regions",
        f"{needs.memory_bytes / 1e9:,.0f} GB",
        f"{needs.memory_bytes / numel:.1f}",
        str(ceil(needs.memory_bytes / HOST_BYTES)),
        f"{needs.disk_bytes / 1e12:,.1f} TB",
        f"{needs.update_s:,.0f} s",
        f"{needs.send_s:,.0f} s" if region else "–",
        f"{link_s:,.0f} s" if region else "–",
        f"{needs.recovery_s / 60:,.0f} min",
        f"{on_disk.memory_bytes / 1e9:,.0f} GB",
        f"{on_disk.memory_bytes / numel:.1f}",
        f"{on_disk.update_s + on_disk.send_s - needs.update_s - needs.send_s:,.0f} s",
    ]


if __name__ == "__main__":  # the table alone, after a change of the formulas
    replace_block(PAGE, "servers", markdown())
