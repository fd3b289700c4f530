"""The tables of docs/monitoring.md, from the code.

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

from prometheus_client import Counter, Gauge

from geotrain.common.files import whole_file
from geotrain.monitor.events import KINDS
from geotrain.monitor.metrics import Metrics


def events_table() -> str:
    """One row a field."""
    rows = ["| event | field | type | what |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        rows.append(f"| **{name}** | | | {' '.join((kind.__doc__ or '').split())} |")
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            hint, text = _split(hints[field.name])
            rows.append(f"| | `{field.name}` | {hint} | {text} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """One row a metric."""
    rows = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for metric in Metrics("run", "site").registry._collector_to_names:
        assert isinstance(metric, Gauge | Counter)
        (family,) = metric.describe()
        total = "_total" if isinstance(metric, Counter) else ""
        labels = ", ".join(name for name in metric._labelnames if name not in ("run", "site"))
        rows.append(f"| `{family.name}{total}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {"events": events_table, "metrics": metrics_table}


def renewed(text: str) -> str:
    """The page's text, with what stands between `<!-- NAME -->` and `<!-- end -->` made anew."""
    for name, table in TABLES.items():
        made = f"<!-- {name} -->\n{table()}\n<!-- end -->".replace("\\", r"\\")
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", made, text, flags=re.DOTALL)
    return text


def _split(hint: Any) -> tuple[str, str]:
    """(type in words, description)."""
    text = ""
    if get_origin(hint) is Annotated:
        hint, text = get_args(hint)
    options = [o for o in get_args(hint) if o is not NoneType] if NoneType in get_args(hint) else []
    if options:
        return f"{_split(options[0])[0]} or null", text
    return getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint), text


if __name__ == "__main__":
    page = Path(sys.argv[1])
    text = renewed(page.read_text(encoding="utf-8"))
    with whole_file(page) as file:
        file.write(text)
