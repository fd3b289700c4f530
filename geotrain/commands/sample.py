"""Writes text with a Hugging Face checkpoint folder, by transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path

import torch

from geotrain.commands.evaluate import load_checkpoint, load_model
from geotrain.kernels.devices import cuda_devices
from geotrain.parameters.hf_checkpoint import HFCheckpointError


def sample(folder: Path, prompt: str, tokens: int | None, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue `prompt` by at most `tokens` tokens (None: 128, or what fits); gives the prompt and what follows it.

    Stops at the end-of-document token. temperature 0 takes the likeliest token each time. An empty prompt starts
    a document. Runs on CUDA when there is one. Raises HFCheckpointError: no model or tokenizer there, or more
    tokens than the model has positions.
    """
    import transformers  # slow to import

    tokenizer = load_checkpoint(folder, "AutoTokenizer")
    model = load_model(folder)
    end = tokenizer.eos_token_id
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
    if None in ids:
        raise HFCheckpointError(f"{folder}: the tokenizer has no eos token to start a document with; give a prompt")
    limit = model.config.max_position_embeddings
    tokens = tokens or max(min(128, limit - len(ids)), 1)
    if len(ids) + tokens > limit:
        raise HFCheckpointError(
            f"a prompt of {len(ids)} tokens and {tokens} more exceed the model's {limit} positions"
        )
    device = "cuda" if cuda_devices() else "cpu"
    start = torch.tensor([ids], device=device)
    # Stated, since generate's defaults draw from the 50 likeliest tokens only. Temperature 0 takes the likeliest.
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    settings = transformers.GenerationConfig(
        **({"do_sample": False} | how), max_new_tokens=tokens, eos_token_id=end, pad_token_id=end
    )
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(seed)
        written = (
            model.to(device)
            .eval()
            .generate(start, attention_mask=torch.ones_like(start), generation_config=settings)[0]
        )
    return str(tokenizer.decode(written, skip_special_tokens=True))
