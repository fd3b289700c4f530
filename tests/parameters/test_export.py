import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from geotrain.commands.evaluate import evaluate, measure
from geotrain.commands.prepare import prepare_files
from geotrain.commands.sample import sample
from geotrain.commands.serve import final_validation
from geotrain.common.files import OutputError
from geotrain.config import ConfigError, RunConfig, UnsupportedModelError, architecture_from_hf
from geotrain.data.loader import open_source
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.parameters.hf_checkpoint import HFCheckpointError, read_checkpoint
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support import families, real_models
from tests.support.hub import LFS_POINTER

SMALL = {"vocab_size": 264, "num_hidden_layers": 2}
PLAIN = "LLAMA", "LLAMA_3", "MIXTRAL", "QWEN_MOE", "QWEN2_MOE", "YARN", "OLMO2", "GEMMA2", "GEMMA3", "GPT_OSS"
LLAMA, LLAMA_3, MIXTRAL, QWEN3_MOE, QWEN2_MOE, YARN, OLMO2, GEMMA2, GEMMA3, GPT_OSS = (
    {**getattr(families, name), **SMALL} for name in PLAIN
)
OLMO3 = {**families.OLMO3, **SMALL, "layer_types": families.ALTERNATING[:2]}
QWEN3_NEXT = {**families.QWEN3_NEXT, **SMALL, "layer_types": families.QWEN3_NEXT["layer_types"][:2]}
QWEN3 = {key: value for key, value in families.QWEN.items() if key != "head_dim"} | SMALL | {"torch_dtype": "float16"}
QWEN2 = {**families.QWEN2, **SMALL, "rope_theta": 1e6}
MISTRAL = {**families.MISTRAL, **SMALL, "sliding_window": None}
SMOLLM3, GRANITE = {**families.SMOLLM3, **SMALL}, {**families.GRANITE, **SMALL}
DEEPSEEK = {key: value for key, value in families.DEEPSEEK.items() if key != "num_key_value_heads"} | SMALL
FAMILIES = [LLAMA, QWEN3, QWEN2, MISTRAL, QWEN3_MOE, MIXTRAL, LLAMA_3, YARN, QWEN2_MOE, DEEPSEEK]
HYBRIDS = "GRANITE_4", "NEMOTRON_H", "NEMOTRON_3"
GRANITE_4, NEMOTRON_H, NEMOTRON_3 = ({**getattr(families, name), "vocab_size": 264} for name in HYBRIDS)
FAMILIES += [NEMOTRON_3, GRANITE_4, NEMOTRON_H, SMOLLM3, GRANITE, OLMO2, OLMO3, GEMMA2, GEMMA3, GPT_OSS, QWEN3_NEXT]
NAMES = ["llama", "qwen3", "qwen2", "mistral", "qwen3_moe", "mixtral", "llama3", "yarn", "qwen2_moe", "deepseek_v3"]
NAMES += ["nemotron_3", "granite_4", "nemotron_h", "smollm3", "granite"]
NAMES += ["olmo2", "olmo3", "gemma2", "gemma3", "gpt_oss", "qwen3_next"]

TOKENS = torch.arange(96)[None] * 7 % 264


def weights(config: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    parameters = canonical_parameters(architecture_from_hf(config))
    return {p.name: torch.rand(p.shape) if p.wide else initial_tensor(p, seed) for p in parameters}


def as_stored(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """transformers keeps the biases of DeepSeek-V3's routers in fp32, whatever the model's type is."""
    return {name: w if name.endswith("e_score_correction_bias") else w.to(dtype) for name, w in weights.items()}


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(folder)
    return folder


@pytest.mark.parametrize("config", FAMILIES, ids=NAMES)
@pytest.mark.parametrize(("dtype", "max_shard_bytes"), [("float32", 30_000), ("bfloat16", 1 << 30)])
def test_export_import_export_is_byte_identical(
    tmp_path: Path, tokenizer: Path, config: dict[str, Any], dtype: Any, max_shard_bytes: int
) -> None:
    original = weights(config)
    write_checkpoint(original.items(), config, tmp_path / "one", tokenizer, dtype, max_shard_bytes)
    read_config, tensors = read_checkpoint(tmp_path / "one")
    read = dict(tensors)
    assert list(read) == list(original)
    for name, tensor in as_stored(original, getattr(torch, dtype)).items():
        assert torch.equal(read[name], tensor), name
    write_checkpoint(reversed(read.items()), read_config, tmp_path / "two", tmp_path / "one", dtype, max_shard_bytes)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    shards = [p for p in (tmp_path / "one").iterdir() if p.suffix == ".safetensors"]
    assert (len(shards) > 1) == (max_shard_bytes < 1 << 30)
    largest = max(t.numel() for t in original.values()) * getattr(torch, dtype).itemsize
    if len(shards) > 1:
        assert max(p.stat().st_size for p in shards) < max(max_shard_bytes, largest) + 4000  # the header


SIZES = [(config, (1 << 30, 30_000)[i % 2]) for i, config in enumerate(FAMILIES)]  # in one file, and in parts


@pytest.mark.parametrize(("config", "max_shard_bytes"), SIZES, ids=NAMES)
def test_transformers_loads_every_weight(
    tmp_path: Path, tokenizer: Path, config: dict[str, Any], max_shard_bytes: int
) -> None:
    original = weights(config)
    write_checkpoint(original.items(), config, tmp_path / "out", tokenizer, "bfloat16", max_shard_bytes)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    loaded = model.state_dict()
    if original.keys() - loaded.keys():  # transformers fuses experts, and takes them apart again when it saves
        model.save_pretrained(tmp_path / "theirs")
        loaded = dict(read_checkpoint(tmp_path / "theirs")[1])
    for name, tensor in as_stored(original, torch.bfloat16).items():
        assert torch.equal(loaded[name], tensor), name
    logits = model(torch.arange(50)[None]).logits
    assert logits.shape == (1, 50, 264)
    assert bool(logits.isfinite().all())


def logits(folder: Path) -> torch.Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    strange = [key for key in report["unexpected_keys"] if f"layers.{model.config.num_hidden_layers}." not in key]
    assert not any([strange, report["missing_keys"], report["mismatched_keys"]])
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def export_beside_its_own(folder: Path, name: str) -> None:
    """An export of a real model's config, and the same weights under the config as it was given."""
    config = real_models.MODELS[name]
    large = {name: t * 4 if t.dim() > 1 else t for name, t in weights(config).items()}
    write_checkpoint(large.items(), config, folder / "export", None, "float32")
    shutil.copytree(folder / "export", folder / "given")
    (folder / "given/config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", real_models.MODELS)
def test_an_export_of_a_real_config_is_the_model_that_transformers_makes_of_that_config(
    tmp_path: Path, name: str
) -> None:
    export_beside_its_own(tmp_path, name)
    assert torch.equal(logits(tmp_path / "export"), logits(tmp_path / "given"))
    written = json.loads((tmp_path / "export/config.json").read_text())
    a = architecture_from_hf(real_models.MODELS[name])
    assert architecture_from_hf(written) == a
    # What version 4 reads; the test below runs it.
    assert written["rope_theta"] == a.rope_theta
    assert (written["rope_scaling"] or {}) == dict(a.rope_scaling)
    known = {*AutoConfig.for_model(a.model_type).to_dict(), "head_dim", "num_experts", "rope_theta", "rope_scaling"}
    # DeepSeek's and our own; version 4's
    older = {"hidden_act", "rope_local_base_freq", "partial_rotary_factor"}
    if a.model_type == "nemotron_h":  # NVIDIA's own
        older |= {"hybrid_override_pattern", "num_hidden_layers", "rms_norm_eps", "rope_parameters"}
    assert set(written) - known <= {"aux_loss_alpha", "router_bias_update_rate", "mtp_loss_factor", *older}


OLDER = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, __version__
assert __version__.startswith("4.57."), __version__
for folder in sys.argv[1:]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    strange = [key for key in report["unexpected_keys"] if f"layers.{model.config.num_hidden_layers}." not in key]
    assert not any([strange, report["missing_keys"], report["mismatched_keys"]]), report
    with torch.no_grad():
        save_file({"logits": model.eval()(torch.tensor(TOKENS)).logits}, folder + "/logits.safetensors")
"""


@pytest.mark.long("geotrain/families")
def test_transformers_4_computes_the_same_of_every_export(tmp_path: Path) -> None:
    """The last version before 5, which reads other keys of the rotary embedding; pip fetches it."""
    wanted = ["transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "older")]
    fetched = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=300)
    assert fetched.returncode == 0, f"a package index is needed: {fetched.stderr[-200:]}"
    names = [name for name in real_models.MODELS if "nemotron" not in name]  # which it has not
    for name in names:
        export_beside_its_own(tmp_path / name, name)
    folders = [str(tmp_path / name / "export") for name in names]
    script = OLDER.replace("TOKENS", str(TOKENS.tolist()))
    paths = {**os.environ, "PYTHONPATH": str(tmp_path / "older")}
    subprocess.run([sys.executable, "-c", script, *folders], env=paths, check=True, timeout=600)
    for folder in folders:
        theirs = load_file(f"{folder}/logits.safetensors")["logits"]
        torch.testing.assert_close(theirs, logits(Path(folder)), rtol=1e-4, atol=1e-4, msg=folder)


@pytest.mark.parametrize("config", FAMILIES, ids=NAMES)
def test_the_exported_config_states_what_was_trained(tmp_path: Path, tokenizer: Path, config: dict[str, Any]) -> None:
    """transformers' defaults differ from ours: Qwen3's head_dim is 128, Llama's eos token is a byte here."""
    write_checkpoint(weights(config).items(), config, tmp_path / "out", tokenizer)
    a, loaded = architecture_from_hf(config), AutoConfig.from_pretrained(tmp_path / "out")
    assert (loaded.head_dim, loaded.num_key_value_heads, loaded.rms_norm_eps) == (a.head_dim, a.kv_heads, a.norm_eps)
    assert (loaded.max_position_embeddings, loaded.tie_word_embeddings) == (a.max_positions, a.tied_embeddings)
    # As its `padding_idx` the eos token's embedding would not be trained any more.
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (None, 256, None)
    names = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3", "granitemoehybrid": "GraniteMoeHybrid"}
    assert loaded.architectures == [f"{names.get(a.model_type, a.model_type.title().replace('_', ''))}ForCausalLM"]
    if len(a.unrotated) < a.layers:
        rope = loaded.rope_parameters.get("full_attention", loaded.rope_parameters)
        assert rope["rope_theta"] == a.rope_theta
        assert rope.items() >= dict(a.rope_scaling).items()
    assert architecture_from_hf(json.loads((tmp_path / "out/config.json").read_text())) == a
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 256


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_a_padded_batch_goes_on_as_its_texts_alone(
    tmp_path: Path, tokenizer: Path, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' tokenizer and generate, with nothing told to them, and nothing that they complain of."""
    write_checkpoint(weights(config, seed=3).items(), config, tmp_path / "out", tokenizer, "float32")
    reads, model = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    )
    assert reads.model_max_length == config["max_position_embeddings"]
    assert model.get_input_embeddings().padding_idx is None
    caplog.clear()
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            texts = ["def ", "a longer text, "]
            batch = reads(texts, padding=True, return_tensors="pt")
            together = model.generate(**batch, max_new_tokens=8, do_sample=False)
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert not caplog.records
    for text, row in zip(texts, together, strict=True):
        alone = model.generate(**reads(text, return_tensors="pt"), max_new_tokens=8, do_sample=False)[0]
        assert torch.equal(alone[-8:], row[-8:])


def test_special_tokens_of_the_config_stay_where_they_agree(tmp_path: Path, tokenizer: Path) -> None:
    several = {**LLAMA, "eos_token_id": [256, 7], "bos_token_id": 1}
    write_checkpoint(weights(LLAMA).items(), several, tmp_path / "out", tokenizer)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"]) == ([256, 7], None)
    write_checkpoint(weights(LLAMA).items(), {**LLAMA, "eos_token_id": 5}, tmp_path / "out", None)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"]) == (5, None)
    assert not (tmp_path / "out/tokenizer.json").exists()


def test_views_of_one_buffer_are_written_apart(tmp_path: Path) -> None:
    """A server may hold all weights in one flat tensor."""
    original = weights(LLAMA)
    flat = torch.cat([t.flatten() for t in original.values()])
    views = zip(original, flat.split([t.numel() for t in original.values()]), strict=True)
    write_checkpoint(
        ((name, view.view_as(original[name])) for name, view in views), LLAMA, tmp_path / "out", dtype="float32"
    )
    stored = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), r"tensor 'extra' is no parameter of this model"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"has shape \[3\]; the model's config says \[32\]",
        ),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), r"'model\.norm\.weight' is not finite in bfloat16"),
    ],
)
def test_wrong_tensors_are_not_exported(tmp_path: Path, change: Any, message: str) -> None:
    tensors = weights(LLAMA)
    change(tensors)
    with pytest.raises(HFCheckpointError, match=message):
        write_checkpoint(tensors.items(), LLAMA, tmp_path / "out")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 (hidden files too)


def test_a_tensor_given_twice_and_a_foreign_folder_are_refused(tmp_path: Path) -> None:
    tensors = list(weights(LLAMA).items())
    with pytest.raises(HFCheckpointError, match="given twice"):
        write_checkpoint(tensors[:1] + tensors, LLAMA, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_text("somebody's model")
    with pytest.raises(OutputError, match="no older export of GeoTrain"):
        write_checkpoint(tensors, LLAMA, tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match="model_type 'gpt2'"):
        write_checkpoint(tensors, {**LLAMA, "model_type": "gpt2"}, tmp_path / "out2")


def edit_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


NORM = "model.norm.weight"


DAMAGES: list[tuple[Any, str]] = [
    (lambda f: (f / "config.json").unlink(), r"config\.json: cannot be read: No such file"),
    (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), r"config\.json: not a JSON object"),
    (lambda f: (f / "model.safetensors").unlink(), "GeoTrain reads safetensors only"),
    (
        lambda f: (f / "model.safetensors").write_text(LFS_POINTER),
        r"safetensors: a Git LFS pointer.*: `git lfs pull`",
    ),
    (lambda f: (f / "config.json").write_text(LFS_POINTER), r"config\.json: a Git LFS pointer"),
    (lambda f: os.truncate(f / "model.safetensors", 5000), r"model\.safetensors: damaged or not safetensors"),
    (lambda f: (f / "model.safetensors").write_text("x" * 50), r"model\.safetensors: damaged or not safetensors"),
    (
        lambda f: edit_tensors(f, **{NORM: None}),
        r"tensor model\.norm\.weight is missing, which config\.json asks",
    ),
    (
        lambda f: edit_tensors(f, **{"lm_head.weight": None}),
        "set tie_word_embeddings to true if the head is tied",
    ),
    (lambda f: edit_tensors(f, a=torch.ones(1), b=torch.ones(1)), "tensors a, b are unknown"),
    (lambda f: edit_tensors(f, **{NORM: torch.ones(31)}), r"has shape \[31\]; config\.json says \[32\]"),
    (lambda f: edit_tensors(f, **{NORM: torch.ones(32).int()}), "is stored as I32; use F32, BF16 or F16"),
]
DAMAGES_OF_PARTS: list[tuple[Any, str]] = [
    (lambda f: next(f.glob("model-00002*")).unlink(), r"model-00002-of-\d+\.safetensors: missing"),
    (lambda f: edit_index(f, lambda m: m.update(x="../x.safetensors")), "lies outside the folder"),
    (lambda f: edit_index(f, lambda m: m.update(x=m[NORM])), r"tensor 'x' is missing, though .* puts it there"),
    (lambda f: edit_index(f, lambda m: m.pop(NORM)), r"tensor model\.norm\.weight is missing"),
    (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "damaged: no weight_map"),
]


@pytest.mark.parametrize(
    ("part_bytes", "damage", "message"),
    [*((1 << 30, *row) for row in DAMAGES), *((30_000, *row) for row in DAMAGES_OF_PARTS)],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, part_bytes: int, damage: Any, message: str) -> None:
    write_checkpoint(weights(LLAMA).items(), LLAMA, tmp_path / "out", max_shard_bytes=part_bytes)
    damage(tmp_path / "out")
    with pytest.raises(HFCheckpointError, match=message):
        read_checkpoint(tmp_path / "out")


def test_of_several_saves_that_one_is_read_which_transformers_takes(tmp_path: Path) -> None:
    """An older one in parts, whose index is left behind; parts that hold a tensor twice."""
    for part_bytes in (30_000, 1 << 30):
        saved = {name: tensor + part_bytes for name, tensor in weights(LLAMA).items()}
        write_checkpoint(saved.items(), LLAMA, tmp_path / f"{part_bytes}", max_shard_bytes=part_bytes)
    folder = shutil.copytree(tmp_path / "30000", tmp_path / "out")
    save_file({NORM: torch.zeros(32)}, folder / "model-00002-of-other.safetensors")
    edit_index(folder, lambda m: m.update({NORM: "model-00002-of-other.safetensors"}))

    def is_as_transformers_has_it() -> None:
        theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, tensor in read_checkpoint(folder)[1]:
            assert torch.equal(tensor.float(), theirs[name].float()), name

    is_as_transformers_has_it()
    shutil.copy(tmp_path / f"{1 << 30}" / "model.safetensors", folder)
    is_as_transformers_has_it()
    for part in folder.glob("model-*"):
        part.unlink()
    is_as_transformers_has_it()


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path: Path) -> None:
    write_checkpoint(weights(QWEN3).items(), QWEN3, tmp_path / "out", dtype="float32")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert "lm_head.weight" not in stored
    embedding = stored["model.embed_tokens.weight"]
    edit_tensors(tmp_path / "out", **{"lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in dict(read_checkpoint(tmp_path / "out")[1])
    edit_tensors(tmp_path / "out", **{"lm_head.weight": embedding + 1})
    with pytest.raises(HFCheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        read_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        *((families.PREDICTING, f"model.layers.3.{copy}.weight") for copy in ("shared_head.head", "embed_tokens")),
        (families.QWEN3_NEXT, "mtp.fc.weight"),
    ],
)
def test_what_transformers_passes_over_is_left_out(tmp_path: Path, config: dict[str, Any], extra: str) -> None:
    """Tables of old checkpoints, and layers of multi-token prediction, but no other layer."""
    write_checkpoint(weights(config).items(), config, tmp_path / "out")
    edit_tensors(tmp_path / "out", **{extra: torch.ones(4)})
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert set(dict(read_checkpoint(tmp_path / "out")[1])) == set(weights(config))
    edit_tensors(tmp_path / "out", **{"model.layers.9.eh_proj.weight": torch.ones(4)})
    with pytest.raises(HFCheckpointError, match=r"model\.layers\.9\.eh_proj\.weight is unknown"):
        read_checkpoint(tmp_path / "out")


def test_eval_takes_no_more_positions_than_the_model_has(tmp_path: Path, tokenizer: Path) -> None:
    write_checkpoint(weights(LLAMA).items(), LLAMA, tmp_path / "out", tokenizer, "float32")
    (tmp_path / "a.txt").write_text("some text " * 400)
    prepare_files([str(tmp_path / "a.txt")], tmp_path / "data", None, None, True, 0.0, processes=1)
    data = tmp_path / "data/train"
    said = measure(tmp_path / "out", data, "", None, 8, 4)
    assert said["sequence_length"] == LLAMA["max_position_embeddings"] == 64
    assert said["loss"] == evaluate(tmp_path / "out", data, 8, 64, 4)
    with pytest.raises(ConfigError, match=r"has 64 positions, samples of 65 tokens .* --sequence-length 64"):
        measure(tmp_path / "out", data, "", 65, 8, 4)


WINDOWED = [{**config, "sliding_window": 5} for config in (MISTRAL, GEMMA2, OLMO3, GPT_OSS)]
DOCUMENTS = [LLAMA, QWEN3_MOE, *WINDOWED]


@pytest.mark.parametrize("config", DOCUMENTS, ids=[config["model_type"] for config in DOCUMENTS])
def test_inside_documents_the_loss_is_that_of_each_document_alone(
    tmp_path: Path, tokenizer: Path, config: dict[str, Any]
) -> None:
    """Measured by `geotrain eval`, and by the global server at the end of a run with such attention."""
    large = {name: (6 * tensor).bfloat16().float() for name, tensor in weights(config).items()}
    write_checkpoint(large.items(), config, tmp_path / "out", tokenizer, "float32")
    texts = [word * times for word, times in (("one ", 3), ("two ", 9), ("three ", 2), ("four", 8))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare_files([str(tmp_path / "a.jsonl")], tmp_path / "data", None, None, True, 0.0, processes=1)
    data, length = tmp_path / "data/train", 24
    source, end = open_source(data, length, config["vocab_size"], None), byte_tokenizer().end_of_document
    tokens = source.batch(np.arange(source.samples_per_epoch))
    assert (tokens == end).sum() > 2
    model, losses = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), []
    for row in tokens:
        ends = [i + 1 for i in range(length) if row[i] == end or i == length - 1]
        for begin, stop in zip([0, *ends[:-1]], ends, strict=True):
            logits = model(row[None, begin:stop]).logits[0]
            losses.append(
                torch.nn.functional.cross_entropy(logits, row[begin + 1 : stop + 1], reduction="sum").item()
            )
    expected = sum(losses) / (len(tokens) * length)
    assert measure(tmp_path / "out", data, "", length, None, 2, inside=True)["loss"] == pytest.approx(
        expected, rel=1e-5
    )
    assert abs(evaluate(tmp_path / "out", data, None, length) / expected - 1) > 1e-3, "documents must matter"
    settings = {"train": str(data), "validation": str(data), "sequence_length": length, "attention": "document"}
    settings |= {"train_samples": 8, "validation_samples": len(tokens)}
    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    block = {**sizes, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    said = {"model": {"config": config}, "data": settings, "monitor": {"validate_every_samples": 400}}
    run = RunConfig.model_validate({"name": "r", "deepspeed": block, **said})
    by_server = final_validation(run)
    assert by_server is not None
    assert by_server(large.items(), lambda: True) == pytest.approx(expected, rel=1e-5)
    large.pop("model.norm.weight")
    with pytest.raises(HFCheckpointError, match=r"tensor model.norm.weight is missing"):  # else it is drawn at random
        by_server(large.items(), lambda: True)


def test_what_passes_a_state_on_knows_no_documents(tmp_path: Path, tokenizer: Path) -> None:
    for config in (QWEN3_NEXT, NEMOTRON_H):
        folder = tmp_path / config["model_type"]
        write_checkpoint(weights(config).items(), config, folder, tokenizer, "float32")
        (tmp_path / "a.txt").write_text("some text " * 40)
        prepare_files([str(tmp_path / "a.txt")], folder / "data", None, None, True, 0.0, processes=1)
        with pytest.raises(ConfigError, match="pass a state from document to document; leave out --inside-documents"):
            measure(folder, folder / "data/train", "", 16, None, 2, inside=True)


def test_a_sample_is_the_models_own_likeliest_text(tmp_path: Path, tokenizer: Path) -> None:
    write_checkpoint(weights(LLAMA, seed=3).items(), LLAMA, tmp_path / "out", tokenizer, "float32")
    prompt = "def "
    text = sample(tmp_path / "out", prompt, tokens=12, temperature=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([list(prompt.encode())])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0]
    assert text == bytes(i for i in expected.tolist() if i < 256).decode(errors="replace")
    assert text.startswith(prompt)


def test_samples_repeat_with_their_seed_only(tmp_path: Path, tokenizer: Path) -> None:
    write_checkpoint(weights(LLAMA).items(), LLAMA, tmp_path / "out", tokenizer, "float32")
    one, again, other = (sample(tmp_path / "out", "", 30, 1.0, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.manual_seed(1)
    end = byte_tokenizer().end_of_document
    drawn = model.generate(  # of all tokens: by default it draws from the likeliest 50
        torch.tensor([[end]]), do_sample=True, top_k=0, max_new_tokens=30, eos_token_id=end, pad_token_id=end
    )[0]
    assert one == bytes(i for i in drawn.tolist() if i < 256).decode(errors="replace")
    with pytest.raises(HFCheckpointError, match="a prompt of 3 tokens and 62 more exceed the model's 64 positions"):
        sample(tmp_path / "out", "abc", 62)
    assert len(sample(tmp_path / "out", "abc", None)) > 3  # as many as fit
    with pytest.raises(HFCheckpointError, match="none: cannot be loaded"):
        sample(tmp_path / "none", "abc", 2)
