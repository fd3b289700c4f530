"""llama.cpp's own converter, for an export whose tokenizer `geotrain prepare` made.

The converter finds how a tokenizer cuts text into words by the ids that it gives a certain text, among those of the
tokenizers that it knows, so it refuses a vocabulary that is new. Those of `--train-bpe` and `--bytes` cut as GPT-2's
does, which is said to it here. An export with another tokenizer needs convert_hf_to_gguf.py alone.

    python examples/to_gguf.py LLAMA_CPP EXPORT --outfile model.gguf

LLAMA_CPP: a checkout of llama.cpp. Other arguments are passed on to its convert_hf_to_gguf.py.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description="A GeoTrain export as GGUF, by llama.cpp's converter.")
    parser.add_argument("llama_cpp", type=Path, help="a checkout of llama.cpp")
    parser.add_argument("export", type=Path, help="what geotrain export wrote")
    parser.add_argument("--outfile", type=Path, required=True, help="the file to write")
    args, passed_on = parser.parse_known_args()
    sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    try:
        import sentencepiece  # noqa: F401 (the converter asks for it late)
        from conversion.base import TextModel
    except ModuleNotFoundError as error:
        parser.error(
            f"there is no {error.name}: {args.llama_cpp} must be a checkout of llama.cpp from 2026; its converter "
            "also needs pip install sentencepiece"
        )
    theirs = TextModel.get_vocab_base_pre

    def name_of_cuts(model: Any, tokenizer: Any) -> str:
        try:
            return str(theirs(model, tokenizer))
        except NotImplementedError:
            read = json.loads(tokenizer.backend_tokenizer.to_str())
            cuts, merges = read["pre_tokenizer"], read["model"]["merges"]
            if read["normalizer"] or cuts["type"] != "ByteLevel" or cuts["add_prefix_space"]:
                raise
            if merges and not cuts["use_regex"]:  # without merges it does not matter where words end
                raise
            return "gpt-2"

    TextModel.get_vocab_base_pre = name_of_cuts
    converter = args.llama_cpp / "convert_hf_to_gguf.py"
    sys.argv = [str(converter), str(args.export), "--outfile", str(args.outfile), *passed_on]
    runpy.run_path(str(converter), run_name="__main__")


if __name__ == "__main__":
    main()
