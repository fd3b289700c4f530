"""The order of the suite, and where its ranks compute."""

from __future__ import annotations

import os

import pytest

# Small worlds have more ranks than a machine has GPUs, and expect the bits of a CPU; processes that tests start
# inherit it. Tests marked `gpu` ask torch itself for the device. It is set before anything imports DeepSpeed.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: processes that take files in turn then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
