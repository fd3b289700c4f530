"""GeoTrain: pretrain language models on GPU clusters in several regions, joined by slow links.

For a training loop of your own: `OuterLoop` (`geotrain.own_loop.loop`), `OuterLoopCallback` for Hugging Face's
Trainer (`geotrain.own_loop.hf_trainer`) and `save_parameters` (`geotrain.own_loop.save`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geotrain.own_loop.hf_trainer import OuterLoopCallback as OuterLoopCallback
    from geotrain.own_loop.loop import OuterLoop as OuterLoop
    from geotrain.own_loop.save import save_parameters as save_parameters

__version__ = "0.2.0"
_WHERE = {
    "OuterLoop": "own_loop.loop",
    "OuterLoopCallback": "own_loop.hf_trainer",
    "save_parameters": "own_loop.save",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: torch takes seconds, and commands need none of them."""
    if name not in _WHERE:
        raise AttributeError(f"module 'geotrain' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"geotrain.{_WHERE[name]}"), name)
