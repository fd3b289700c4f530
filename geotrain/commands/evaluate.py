"""Measures a Hugging Face checkpoint folder with transformers, independent of how it was trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geotrain.config import ConfigError, RunConfig
from geotrain.data.dataset import end_of_documents
from geotrain.data.loader import open_source
from geotrain.data.tokens import DataError
from geotrain.families import family_of
from geotrain.inner.model.documents import cu_seqlens, inside_documents
from geotrain.kernels.devices import cuda_devices
from geotrain.parameters.hf_checkpoint import HFCheckpointError, predicting_names, some

USUAL_LENGTH = 1024  # tokens of a sample, when none are asked for
TOKENS_AT_ONCE = 8192  # of a run's final validation: a batch's logits are 4 bytes for each and each id


def measure(
    folder: Path,
    validation: Path | None,
    tasks: str,
    sequence_length: int | None,
    limit: int | None,
    batch: int,
    task_folder: Path | None = None,
    inside: bool = False,
) -> dict[str, Any]:
    """Measure a checkpoint folder; returns what `geotrain eval` prints. tasks: names, separated by commas.
    sequence_length: None takes the model's, see `usual_length`. inside: attention stays inside documents. Raises
    ConfigError, DataError, HFCheckpointError."""
    if validation is None and not tasks:
        raise ConfigError("say what to measure: --data PREFIX, --tasks TASK,…, or both")
    said: dict[str, Any] = {}
    if validation is not None:
        length = sequence_length or usual_length(folder)
        said |= {"loss": evaluate(folder, validation, limit, length, batch, inside), "sequence_length": length}
    if tasks:
        said["tasks"] = run_tasks(folder, tasks.split(","), limit, batch, task_folder)
    return said


def usual_length(folder: Path) -> int:
    """Tokens of a sample when none are asked for: as many as the model has positions, at most 1,024. Raises
    HFCheckpointError."""
    return min(USUAL_LENGTH, _positions(load_checkpoint(folder, "AutoConfig")))


def _positions(config: Any) -> int:
    """How many tokens the model was made for; a model that does not say takes any number."""
    return int(getattr(config, "max_position_embeddings", None) or sys.maxsize)


def load_checkpoint(folder: Path | None, auto_class: str, **settings: Any) -> Any:
    """Load a checkpoint folder by a class of transformers. Raises HFCheckpointError."""
    import transformers  # slow to import

    transformers.utils.logging.disable_progress_bar()
    try:
        return getattr(transformers, auto_class).from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # the library raises whatever its parsers raise
        lines = str(error).strip().splitlines()
        raise HFCheckpointError(
            f"{folder}: cannot be loaded: {lines[0] if lines else type(error).__name__}"
        ) from None


def load_model(folder: Path | None, kind: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    """Load a model. folder: None: the settings have its weights. Raises HFCheckpointError, also where one is missing
    or of another shape: transformers would draw it at random."""
    model, found = load_checkpoint(folder, kind, output_loading_info=True, **settings)
    if lacks := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise HFCheckpointError(f"{folder or 'the weights'}: {some(lacks)} missing, or of another shape")
    return model


def evaluate(
    folder: Path, validation: Path, samples: int | None, sequence_length: int, batch: int = 16, inside: bool = False
) -> float:
    """Mean loss in nats a token over the first `samples` samples (None: all) of a prepared data set, in fp32.

    validation: prefix of its .bin/.idx pair. A sample is `sequence_length` tokens and the one that follows, as in
    training. inside: attention stays inside documents, as with `data.attention` = "document". Runs on CUDA when there
    is one. Raises HFCheckpointError, DataError; ConfigError if the model has fewer positions: it would compute on,
    and worse.
    """
    model = load_model(folder, dtype=torch.float32)
    if sequence_length > _positions(model.config):
        raise ConfigError(
            f"{folder}: the model has {_positions(model.config)} positions, samples of {sequence_length} tokens do "
            f"not fit; use --sequence-length {_positions(model.config)}, or what it was trained with"
        )
    return loss_of_model(model, validation, samples, sequence_length, batch, inside)


def loss_of_weights(run: RunConfig, weights: Iterable[tuple[str, Tensor]], go_on: Callable[[], bool]) -> float:
    """The run's validation loss with these weights, in bf16 as workers take them: nats a token.

    weights: (canonical name, fp32 tensor). go_on: see `loss_of_model`. Raises as that does.
    """
    import transformers  # slow to import

    assert run.data.validation is not None
    config = transformers.CONFIG_MAPPING[run.model.config["model_type"]].from_dict(run.model.config)
    # As a checkpoint: of experts, and of some families' layers, the model itself has other names and shapes.
    kind = family_of(run.architecture.model_type).transformers_class
    further = predicting_names(run.architecture)  # nothing to transformers
    taken = {name: tensor.bfloat16() for name, tensor in weights if not name.startswith(further)}
    model = load_model(None, kind, config=config, state_dict=taken, dtype=torch.float32)
    length, inside = run.data.sequence_length, run.data.attention == "document"
    batch = max(1, TOKENS_AT_ONCE // length)
    return loss_of_model(model, Path(run.data.validation), run.data.validation_samples, length, batch, inside, go_on)


def loss_of_model(
    model: Any,
    validation: Path,
    samples: int | None,
    sequence_length: int,
    batch: int,
    inside: bool,
    go_on: Callable[[], bool] = lambda: True,
) -> float:
    """Mean loss of a model of transformers in nats a token, over samples of a prepared data set. go_on: asked before
    each batch; when it says no, TimeoutError is raised. Raises DataError."""
    end = end_of_documents([str(validation)]) if inside else None
    source = open_source(validation, sequence_length, model.config.vocab_size, None)
    samples = source.samples_per_epoch if samples is None else samples
    if samples > source.samples_per_epoch:
        raise DataError(f"{validation}: {samples} samples are wanted, but there are {source.samples_per_epoch}")
    device = "cuda" if cuda_devices() else "cpu"
    model = model.to(device).eval()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, samples, batch):
            if not go_on():
                raise TimeoutError(f"{start} of {samples} samples were evaluated in the time there was")
            tokens = source.batch(np.arange(start, min(start + batch, samples))).to(device)
            seen = tokens[:, :-1]
            logits = model(seen, attention_mask=None if end is None else _mask(model, seen, end)).logits.float()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / (samples * sequence_length)


def _mask(model: Any, tokens: Tensor, end_of_document: int) -> Tensor | dict[str, Tensor]:
    """Attention mask, what is added to scores, [batch, 1, length, length], as training has it with attention inside
    documents. A mask of four dimensions replaces transformers' own, so a sliding window is in it, too; where layers
    differ in it, there are both by their names. Raises ConfigError where documents cannot be kept apart."""
    inside = inside_documents(cu_seqlens(tokens, end_of_document), *tokens.shape)
    window = getattr(model.config, "sliding_window", None)
    seen = {"full_attention": inside, "sliding_attention": inside if window is None else inside.triu(1 - window)}
    least = torch.finfo(torch.float32).min
    masks = {kind: torch.where(mask, 0.0, least) for kind, mask in seen.items()}
    kinds = set(getattr(model.config, "layer_types", None) or ["sliding_attention"])
    if kinds - seen.keys():
        raise ConfigError(
            f"layers of a {model.config.model_type} pass a state from document to document; leave out "
            "--inside-documents"
        )
    return masks if len(kinds) > 1 else masks[kinds.pop()]


def run_tasks(
    folder: Path, tasks: list[str], limit: int | None, batch: int, task_folder: Path | None = None
) -> dict[str, dict[str, float]]:
    """Tasks of EleutherAI's lm-evaluation-harness: task → its figures, as the harness names them.

    limit: examples a task at most. task_folder: with YAML files of tasks, in place of the harness's own. Raises
    HFCheckpointError, DataError (no such task), ConfigError (no harness).
    """
    if not (folder / "config.json").exists():
        raise HFCheckpointError(
            f"{folder}: is no checkpoint folder (no config.json); make one with `geotrain export`"
        )
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError(
            "geotrain eval --tasks needs lm-evaluation-harness, which is not installed: pip install lm-eval"
        ) from None
    device = "cuda" if cuda_devices() else "cpu"
    try:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=tasks,
            task_manager=TaskManager(include_path=task_folder, include_defaults=task_folder is None),
            limit=limit,
            batch_size=batch,
            device=device,
        )
    except (KeyError, ValueError) as error:  # what the harness raises for names that it does not know
        raise DataError(f"lm-evaluation-harness, tasks {', '.join(tasks)}: {error}") from None
    return {
        task: {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in found["results"].items()
    }
