"""Compiles a mutated source in place of a module's own, in every Python process whose environment names both files.

Python imports a `sitecustomize` that it finds on its path when it starts, so processes that a test starts have the
mutant too. No file of the checkout changes.
"""

import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

MUTATED, SOURCE = "GEOTRAIN_MUTATED", "GEOTRAIN_MUTATED_SOURCE"  # the module's file, and the one compiled instead


def install() -> None:
    mutated, get_code = os.environ[MUTATED], SourceFileLoader.get_code

    def get_mutated_code(self: SourceFileLoader, name: str) -> Any:
        if os.path.realpath(self.path) != mutated:
            return get_code(self, name)
        return compile(Path(os.environ[SOURCE]).read_bytes(), mutated, "exec", dont_inherit=True)

    SourceFileLoader.get_code = get_mutated_code  # type: ignore[method-assign]


if MUTATED in os.environ:
    install()
