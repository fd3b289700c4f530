"""Tokenizing processes fork from one that has imported what they need; the product starts each anew."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from geotrain.data import prepare
from tests.support.forks import FORKS, preload

preload("geotrain.data.prepare")


@pytest.fixture(autouse=True)
def _processes_that_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "multiprocessing", SimpleNamespace(get_context=lambda kind: FORKS))
