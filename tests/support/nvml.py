"""NVML without a device: a small library with its symbols, compiled from nvml.c, whose answers are the test's."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pynvml
import pytest


class Nvml:
    """What NVML answers in this process. Keys: see nvml.c."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library, self._state = folder / "libnvidia-ml.so.1", folder / "nvml-state"
        self._said = dict[str, int]()
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
        self.say({})
        monkeypatch.setenv("NVML_STATE", str(self._state))
        monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(folder / name)))
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def say(self, answers: Mapping[str, int]) -> None:
        """Change some answers, at once."""
        self._said |= answers
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(f"{key} {value}\n" for key, value in self._said.items()))
        fresh.replace(self._state)

    def go_on(self) -> None:
        """Let what hangs return."""
        self.say({key: 0 for key in self._said if key.endswith(".hang")})
