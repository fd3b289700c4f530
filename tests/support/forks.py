"""Ranks and servers of tests fork from a process that has imported what they need: that takes seconds, and there are
many of them."""

from __future__ import annotations

import importlib.util
import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
_preloaded = ["pytest", "hypothesis"]  # each fork imports the test that it is of


def preload(*modules: str) -> None:
    """Before the first process starts. Python has one server of forks, whose list each call would otherwise replace;
    and it passes over a module that cannot be found."""
    for module in modules:
        assert importlib.util.find_spec(module), f"there is no {module}"
    _preloaded.extend(modules)
    FORKS.set_forkserver_preload(_preloaded)
