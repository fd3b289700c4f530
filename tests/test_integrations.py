"""Programs of others that take what GeoTrain writes, themselves and offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from geotrain.commands.evaluate import measure
from geotrain.config import architecture_from_hf
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.data.tokens import DataError
from geotrain.hf_checkpoint import write_checkpoint
from geotrain.initial import initial_tensor
from geotrain.layout import canonical_parameters
from tests.support.small_runs import MODEL

TASK = """
task: which_follows
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as `geotrain export` writes it, with a tokenizer whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("exported")
    byte_tokenizer().save(folder / "tokenizer")
    config = {**MODEL, "max_position_embeddings": 64}
    parameters = canonical_parameters(architecture_from_hf(config))
    tensors = ((p.name, initial_tensor(p, 3) * 4) for p in parameters)
    write_checkpoint(tensors, config, folder / "out", folder / "tokenizer", "float32")
    return folder / "out"


def test_a_task_of_ones_own_in_the_evaluation_harness(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-evaluation-harness itself finds what the model's own probabilities say."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    questions = [(f"number {n} is", [" odd", " even", f" {n}"], n % 3) for n in range(8)]
    data = tmp_path / "questions.jsonl"
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in questions]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/own.yaml").write_text(TASK.format(data=data))
    said = measure(exported, None, "which_follows", None, None, 4, tmp_path / "tasks")

    model = AutoModelForCausalLM.from_pretrained(exported)
    right = 0
    for question, choices, answer in questions:
        likely = []
        for choice in choices:
            ids = torch.tensor([list((question + choice).encode())])
            logs = model(ids).logits[0, :-1].detach().log_softmax(-1).gather(1, ids[0, 1:, None])
            likely.append(float(logs[len(question.encode()) - 1 :].sum()))
        right += max(range(3), key=likely.__getitem__) == answer
    assert 0 < right < 8  # else it would say little
    assert said["tasks"]["which_follows"]["acc,none"] == right / 8
    with pytest.raises(DataError, match="nonsense"):
        measure(exported, None, "nonsense", None, None, 4, tmp_path / "tasks")
