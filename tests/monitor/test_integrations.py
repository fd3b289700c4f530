"""Programs of others that take what GeoTrain writes, themselves and offline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from geotrain.commands.evaluate import measure
from geotrain.config import architecture_from_hf
from geotrain.data.tokenizer import byte_tokenizer, train_bpe
from geotrain.data.tokens import DataError
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.small_runs import MODEL

ROOT = Path(__file__).parents[2]

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


@pytest.mark.long(
    "examples/to_gguf.py",
    "geotrain/parameters/hf_export.py",
    "geotrain/data/tokenizer.py",
    "launch/test_converter.sh",
)
@pytest.mark.slow
def test_llama_cpps_converter_keeps_weights_and_tokens(tmp_path: Path) -> None:
    """The converter itself writes a file of which transformers computes the export's logits."""
    llama_cpp = Path(sys.prefix) / "llama.cpp"
    subprocess.run(["bash", "launch/test_converter.sh", sys.executable, llama_cpp], cwd=ROOT, check=True, timeout=300)
    tokenizer = train_bpe([(ROOT / "README.md").read_text()], 304)
    tokenizer.save(tmp_path / "tokenizer")
    config = {**MODEL, "model_type": "llama", "vocab_size": 304, "max_position_embeddings": 64}
    parameters = canonical_parameters(architecture_from_hf(config))
    tensors = ((p.name, initial_tensor(p, 3) * 4) for p in parameters)
    write_checkpoint(tensors, config, tmp_path / "out", tmp_path / "tokenizer", "float32")

    command = [sys.executable, ROOT / "examples/to_gguf.py", llama_cpp, tmp_path / "out"]
    wanted = ["--outfile", tmp_path / "model.gguf", "--outtype", "f32"]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    read = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in read.fields.items()}
    assert fields["llama.context_length"] == 64 and fields["tokenizer.ggml.pre"] == "gpt-2"
    vocabulary = json.loads(tokenizer.json)["model"]
    assert len(fields["tokenizer.ggml.tokens"]) == 304
    assert all(fields["tokenizer.ggml.tokens"][i] == token for token, i in vocabulary["vocab"].items())
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in vocabulary["merges"]]
    assert fields["tokenizer.ggml.eos_token_id"] == fields["tokenizer.ggml.padding_token_id"] == 0
    stored = {tensor.name: tensor for tensor in read.tensors}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    embedding = torch.tensor(stored["token_embd.weight"].data)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert tuple(stored["blk.0.ffn_down.weight"].shape) == (config["intermediate_size"], config["hidden_size"])

    ids = torch.arange(40)[None]
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
