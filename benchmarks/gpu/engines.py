"""Compare the engine on this machine's GPU with itself on its processor: losses and gradient norms of the first
steps, from equal weights and tokens. bf16 rounds otherwise on a GPU: losses are to agree within 1 %, norms within
5 %; in fp32 within 1e-4 and 1e-3.

    python -m benchmarks.gpu.engines ANSWERS.jsonl CASE …        on one device, which DS_ACCELERATOR chooses
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Tell
from benchmarks.processes import be_only_rank

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


def compare(names: list[str], tell: Tell) -> None:
    """Tell how far losses and norms of each case lie apart on both devices, at most, over what is allowed: up to 1
    they agree. A case that fails on either has no figure; what failed is printed. Raises RuntimeError at the end
    then."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        answers = {device: Path(folder) / f"{device}.jsonl" for device in ("device", "cpu")}
        processes = {device: _start(device, answers[device], names) for device in answers}
        try:
            for name in names:
                here, there = (_answer(answers[device], processes[device], name) for device in answers)
                if here and there:
                    loose = CASES[name].get("bf16", True)
                    most = {"losses": 1e-2 if loose else 1e-4, "norms": 5e-2 if loose else 1e-3}
                    tell(f"engines.{name}", max(_apart(here[k], there[k]) / most[k] for k in most))
                else:
                    failed.append(name)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    if failed:
        raise RuntimeError(f"no figure of {', '.join(failed)}; see above")


def _start(device: str, answers: Path, names: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"} if device == "cpu" else {**os.environ}
    return subprocess.Popen([sys.executable, "-m", "benchmarks.gpu.engines", str(answers), *names], env=environment)


def _answer(answers: Path, process: subprocess.Popen[bytes], name: str) -> dict[str, list[float]] | None:
    """What a process found of a case, once it is there; None where it failed, or ended before. The part's own limit
    ends the wait."""
    while True:
        ended = process.poll() is not None
        whole = answers.read_text().rpartition("\n")[0] if answers.exists() else ""
        for row in map(json.loads, whole.splitlines()):
            if row["case"] == name:
                return row if "losses" in row else None
        if ended:
            return None
        time.sleep(0.1)


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
) -> dict[str, list[float]]:
    """Train a case for some steps on this process's device."""
    import torch

    from benchmarks.hide.ranks import write
    from geotrain.config import AccoConfig, DataConfig, ModelConfig, ParallelConfig, RunConfig, architecture_from_hf
    from geotrain.data.loader import StepBatch
    from geotrain.inner.build import build_engine
    from geotrain.inner.runtime import parallel
    from geotrain.parameters.parameter_map import canonical_parameters

    block = {
        "train_batch_size": MICRO * COUNT, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 1.0,
        "optimizer": optimizer, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16},
    }  # fmt: skip
    run = RunConfig(
        name="engines",
        model=ModelConfig(config=model, init_from=None, recompute=recompute),
        data=DataConfig(train="-", validation=None, tokenizer=None, sequence_length=SEQUENCE, train_samples=1 << 20),
        deepspeed=block,
        acco=acco and AccoConfig(**acco),
    )
    engine = build_engine(run, ParallelConfig(), run.deepspeed, end_of_document=end_of_document)
    drawn = torch.Generator().manual_seed(0)
    write(
        engine,
        {
            p.name: torch.randn(p.shape, generator=drawn) * p.init_std + (1.0 if p.init == "ones" else 0.0)
            for p in canonical_parameters(architecture_from_hf(model))
        },
    )
    # The same at each step: the loss falls.
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
    be_only_rank()
    from geotrain.inner.runtime import parallel

    for name in names:
        try:
            found: dict[str, Any] = dict(play(**CASES[name]))
        except Exception as error:  # one case's fault, whatever it is, is told and leaves the others their time
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
            found = {}
            parallel.shut_down(leave_world=False)
        with Path(answers).open("a") as file:
            file.write(json.dumps({"case": name, **found}) + "\n")
    parallel.shut_down()


if __name__ == "__main__":
    main()
