"""Makes the tables of docs/monitoring.md from the code.

`python -m tests.support.monitoring_tables docs/monitoring.md` renews them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from geotrain.common.files import whole_file
from geotrain.monitor.events import KINDS
from geotrain.monitor.metrics import collector
from geotrain.monitor.registry import METRICS
from geotrain.outer.metrics import Metric


def events_table() -> str:
    """The events, a row for each of their fields."""
    rows = ["| event | field | type | what |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        rows.append(f"| **{name}** | | | {' '.join((kind.__doc__ or '').split())} |")
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            hint, text = _split(hints[field.name])
            rows.append(f"| | `{field.name}` | {hint} | {text} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """The metrics, a row for each."""
    rows = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for metric in METRICS:
        (family,) = collector(metric).describe()
        total = "_total" if family.type == "counter" else ""
        rows.append(f"| `{family.name}{total}` | {family.type} | {', '.join(metric.labels)} | {metric.help} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {"events": events_table, "metrics": metrics_table}


def renewed(text: str) -> str:
    """Return the page's text, with what stands between `<!-- NAME -->` and `<!-- end -->` made anew."""
    for name, table in TABLES.items():
        made = f"<!-- {name} -->\n{table()}\n<!-- end -->".replace("\\", r"\\")
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", made, text, flags=re.DOTALL)
    return text


def _split(hint: Any) -> tuple[str, str]:
    """Return the type in words, and the description."""
    text = ""
    if get_origin(hint) is Annotated:
        hint, note = get_args(hint)[:2]
        text = note.help if isinstance(note, Metric) else note
    options = [o for o in get_args(hint) if o is not NoneType] if NoneType in get_args(hint) else []
    if options:
        return f"{_split(options[0])[0]} or null", text
    return getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint), text


if __name__ == "__main__":
    page = Path(sys.argv[1])
    text = renewed(page.read_text(encoding="utf-8"))
    with whole_file(page) as file:
        file.write(text)
