"""Compare the engine on this machine's GPU with itself on its processor: losses and gradient norms of the first
steps, from equal weights and tokens; of one rank, and of two that share the GPU over gloo. bf16 rounds otherwise on a
GPU: losses are to agree within 1 %, norms within 5 %; in fp32 within 1e-4 and 1e-3.

    python -m benchmarks.gpu.engines ANSWERS.jsonl CASE …        a rank, as the environment says which and where
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.rows import Tell
from geotrain.common.names import SHARE_DEVICES
from geotrain.launch.check import free_ports

STEPS, SEQUENCE, MICRO, COUNT, VOCABULARY = 4, 128, 4, 2, 512
DENSE = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": SEQUENCE, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {**DENSE, "num_key_value_heads": 2}
EXPERTS = {
    **DENSE, "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.001,
}  # fmt: skip
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
MUON = {"type": "Muon", "params": {"lr": 1e-3, "weight_decay": 0.1}}
# What differs from a dense model in bf16 with ZeRO-1 and AdamW.
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"bf16": False, "stage": 0},
    "tied, grouped": {"model": {**GROUPED, "tie_word_embeddings": True}},
    "documents": {"model": GROUPED, "end_of_document": 7},
    "Muon": {"optimizer": MUON},
    "ZeRO 2": {"stage": 2},
    "recompute": {"recompute": "full"},
    "experts": {"model": EXPERTS},
    "ACCO": {"acco": {"synchronous_steps": 0}},
    "ACCO, exact": {"acco": {"synchronous_steps": 0, "form": "exact"}},
    "ACCO, Muon": {"acco": {"synchronous_steps": 1}, "optimizer": MUON},
}
# What two ranks play too, and in which layout.
PAIR = "two ranks, "
PAIRS: dict[str, dict[str, int]] = {
    "bf16": {}, "fp32": {}, "Muon": {}, "ACCO": {}, "ACCO, exact": {}, "ACCO, Muon": {},
    "tied, grouped": {"tensor": 2}, "experts": {"expert": 2},
}  # fmt: skip
PAIRED = [PAIR + name for name in PAIRS]


@dataclass
class World:
    """Processes that play cases on one device, as ranks of one worker, and where they put what they have found."""

    answers: Path
    ranks: list[subprocess.Popen[bytes]]

    @staticmethod
    def of(device: str, count: int, names: list[str], folder: Path) -> World:
        answers = folder / f"{device}-{count}.jsonl"
        command = [sys.executable, "-m", "benchmarks.gpu.engines", str(answers), *names]
        env = {**os.environ, "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        env |= {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {SHARE_DEVICES: "1"} if count > 1 else {}
        numbers = map(str, range(count))
        return World(answers, [subprocess.Popen(command, env={**env, "RANK": n, "LOCAL_RANK": n}) for n in numbers])

    def answer(self, name: str) -> dict[str, list[float]] | None:
        """What was found of a case, once it is there; None where it failed, or a rank ended before. The part's own
        limit ends the wait."""
        while True:
            ended = [rank.poll() for rank in self.ranks]
            whole = self.answers.read_text().rpartition("\n")[0] if self.answers.exists() else ""
            for row in map(json.loads, whole.splitlines()):
                if row["case"] == name:
                    return row if "losses" in row else None
            if any(ended) or None not in ended:
                return None
            time.sleep(0.1)


def compare(names: list[str], tell: Tell) -> None:
    """Tell how far losses and norms of each case lie apart on both devices, at most, over what is allowed: up to 1
    they agree. A case that fails on either has no figure; what failed is printed. Raises RuntimeError at the end
    then."""
    failed = []
    by_count = {1: [n for n in names if not n.startswith(PAIR)], 2: [n for n in names if n.startswith(PAIR)]}
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[tuple[str, int], World] = {}
        try:
            for count, some in by_count.items():
                for device in ("device", "cpu") if some else ():
                    worlds[device, count] = World.of(device, count, some, Path(folder))
            for name in names:
                count = 2 if name.startswith(PAIR) else 1
                here, there = (worlds[device, count].answer(name) for device in ("device", "cpu"))
                if here and there:
                    loose = CASES[name.removeprefix(PAIR)].get("bf16", True)
                    most = {"losses": 1e-2 if loose else 1e-4, "norms": 5e-2 if loose else 1e-3}
                    tell(f"engines.{name}", max(_apart(here[k], there[k]) / most[k] for k in most))
                else:
                    failed.append(name)
        finally:
            for process in (rank for world in worlds.values() for rank in world.ranks):
                process.kill()
                process.wait()
    if failed:
        raise RuntimeError(f"no figure of {', '.join(failed)}; see above")


def _apart(here: list[float], there: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(here, there, strict=True))


def play(
    model: dict[str, Any] = DENSE,
    optimizer: dict[str, Any] = ADAM,
    bf16: bool = True,
    stage: int = 1,
    acco: dict[str, Any] | None = None,
    end_of_document: int | None = None,
    recompute: Any = "none",
    layout: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Train a case for some steps, as this rank, on its device. layout: of `ParallelConfig`."""
    import torch

    from benchmarks.hide.ranks import write
    from geotrain.config import AccoConfig, DataConfig, ModelConfig, ParallelConfig, RunConfig, architecture_from_hf
    from geotrain.data.loader import StepBatch
    from geotrain.inner.build import build_engine
    from geotrain.inner.runtime import parallel
    from geotrain.parameters.parameter_map import canonical_parameters

    parallel_layout = ParallelConfig(**layout)
    replicas = int(os.environ["WORLD_SIZE"]) // parallel_layout.replica_ranks
    block = {
        "train_batch_size": MICRO * COUNT * replicas, "train_micro_batch_size_per_gpu": MICRO, "optimizer": optimizer,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16},
    }  # fmt: skip
    run = RunConfig(
        name="engines",
        model=ModelConfig(config=model, init_from=None, recompute=recompute),
        data=DataConfig(train="-", validation=None, tokenizer=None, sequence_length=SEQUENCE, train_samples=1 << 20),
        deepspeed=block,
        acco=acco and AccoConfig(**acco),
    )
    engine = build_engine(run, parallel_layout, run.deepspeed, end_of_document=end_of_document)
    drawn = torch.Generator().manual_seed(0)
    write(
        engine,
        {
            p.name: torch.randn(p.shape, generator=drawn) * p.init_std + (1.0 if p.init == "ones" else 0.0)
            for p in canonical_parameters(architecture_from_hf(model))
        },
    )
    # The same at each step: the loss falls.
    drawn.manual_seed(1 + engine.dp_rank)
    batches = [torch.randint(0, VOCABULARY, (MICRO, SEQUENCE + 1), generator=drawn) for _ in range(COUNT)]
    if end_of_document is not None:
        for tokens in batches:
            tokens[:, 40] = tokens[:, 90] = end_of_document
    results = [engine.train_step(StepBatch(batches, batches.__getitem__), step) for step in range(STEPS)]
    engine.settle()
    found = {"losses": [float(r.loss) for r in results], "norms": [float(r.grad_norm) for r in results]}
    engine.close()
    parallel.shut_down(leave_world=False)
    return found


def main() -> None:
    answers, *names = sys.argv[1:]
    from geotrain.inner.runtime import parallel

    alone = os.environ["WORLD_SIZE"] == "1"
    for name in names:
        case = name.removeprefix(PAIR)
        try:
            found: dict[str, Any] = dict(play(**CASES[case], layout={} if alone else PAIRS[case]))
        except Exception as error:  # one case's fault, whatever it is, is told and leaves the others their time
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
            if not alone:
                sys.exit(1)  # the other rank waits for this one: no later case can be had
            found = {}
            parallel.shut_down(leave_world=False)
        if os.environ["RANK"] == "0":
            with Path(answers).open("a") as file:
                file.write(json.dumps({"case": name, **found}) + "\n")
    parallel.shut_down()


if __name__ == "__main__":
    main()
