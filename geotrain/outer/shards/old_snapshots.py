"""What older versions of a server have saved, as it is now."""

from __future__ import annotations

import re

from torch import Tensor

# Fragments that are one chunk each: fragment.3.x, in_flight.12.3.
_OLDER = ((re.compile(r"fragment\.(?=\d)"), "chunk."), (re.compile(r"in_flight\.\d+\.(?=\d)"), "in_flight."))


def state_as_now(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state, under the names and with the meaning that they have now."""
    now = {as_now(name): tensor for name, tensor in tensors.items()}
    # What was sent had memory of its own; now it takes that of base, which is not needed before the answer.
    for name in [name for name in now if name.endswith(".aux.sent")]:
        sent, chunk = now.pop(name), name.split(".")[1]
        if f"in_flight.{chunk}" in now:
            now[f"chunk.{chunk}.aux.base"] = sent
    return now


def as_now(tensor: str) -> str:
    """The name that a tensor of a state, perhaps of an older version, has now."""
    for older, now in _OLDER:
        if older.match(tensor):
            return older.sub(now, tensor, count=1)
    return tensor
