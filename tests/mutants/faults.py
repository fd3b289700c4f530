"""The list of seeded faults, `faults.toml`: a table each, with the fault's name, its file, and the tests that notice
it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Fault:
    """A fault in one file of the product. old: text that occurs once in it; new: takes its place. breaks: what no
    longer holds. tests: files or node ids that should notice it, the likeliest first. text: of the file
    with the fault; "": to be made of old and new. left_out: how many more tests execute it."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    text: str = ""
    left_out: int = 0

    def mutated(self) -> str:
        """Return the file's text with the fault. Raises ValueError where the list does not follow the code."""
        if self.text:
            return self.text
        text = (ROOT / self.file).read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {found} places like {self.old!r}, and must have 1")
        return text.replace(self.old, self.new)


def read_faults(path: Path = FAULTS) -> list[Fault]:
    tables = tomllib.loads(path.read_text())
    return [Fault(name, **{**table, "tests": tuple(table["tests"])}) for name, table in tables.items()]
