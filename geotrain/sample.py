"""Text from a Hugging Face checkpoint folder, one token after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from geotrain.export import CheckpointError


def sample(folder: Path, prompt: str, tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue `prompt` by at most `tokens` tokens; gives the prompt and what follows it.

    Stops at the end-of-document token. temperature 0 takes the likeliest token each time. An empty prompt starts
    a document. Runs on CUDA when there is one. Raises CheckpointError: no model or tokenizer there, or more
    tokens than the model has positions.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import, and needed here alone
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers raise
        lines = str(error).strip().splitlines()
        raise CheckpointError(f"{folder}: cannot be loaded: {lines[0] if lines else type(error).__name__}") from None
    end = tokenizer.eos_token_id
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
    if None in ids:
        raise CheckpointError(f"{folder}: the tokenizer has no eos token to start a document with; give a prompt")
    limit = model.config.max_position_embeddings
    if len(ids) + tokens > limit:
        raise CheckpointError(f"a prompt of {len(ids)} tokens and {tokens} more exceed the model's {limit} positions")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    fresh, cache = torch.tensor([ids], device=device), None
    with torch.inference_mode():
        for _ in range(tokens):
            output = model(fresh, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            fresh = _choose(output.logits[0, -1].float(), temperature, generator).view(1, 1)
            if fresh.item() == end:
                break
            ids.append(int(fresh.item()))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
