"""Ranks and servers of tests fork from a process that has imported what they need: that takes seconds, and there are
many of them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.forks_loaded"])
PRELOADED = "GEOTRAIN_TEST_PRELOADED"  # their names, for the server of forks


def preload(*modules: str) -> None:
    """Before the first process starts. Python has one server of forks; it passes over a module that cannot be
    found."""
    for module in modules:
        assert importlib.util.find_spec(module), f"there is no {module}"
    os.environ[PRELOADED] = " ".join(dict.fromkeys((*os.environ.get(PRELOADED, "").split(), *modules)))
