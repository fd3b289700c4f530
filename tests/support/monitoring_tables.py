"""Makes the lists of docs/monitoring.md from the code.

`python -m tests.support.monitoring_tables docs/monitoring.md` renews them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from inspect import formatannotation
from pathlib import Path
from typing import get_args, get_type_hints

from geotrain.common.files import whole_file
from geotrain.monitor.events import KINDS
from geotrain.monitor.metrics import collector
from geotrain.monitor.registry import METRICS
from geotrain.outer.events import Event
from geotrain.outer.metrics import Metric


def events_list() -> str:
    """The events with their fields; a field that means the same in several events is explained once, before them."""
    described = {name: described_fields(kind) for name, kind in KINDS.items()}
    seen = Counter(field for found in described.values() for field in found.items())
    shared = [f"- `{name}` {text}" for (name, text), events in seen.items() if events > 1]
    lines = ["Fields that several events have:", "", *shared, "", "The events, with the names of these fields:", ""]
    for event, found in described.items():
        names = ", ".join(f"`{name}`" for name, text in found.items() if seen[name, text] > 1)
        text = " ".join((KINDS[event].__doc__ or "").split())
        lines.append(f"- **{event}** ({names}): {text}" if names else f"- **{event}**: {text}")
        lines += [f"  - `{name}` {text}" for name, text in found.items() if seen[name, text] == 1]
    return "\n".join(lines)


def described_fields(kind: type[Event]) -> dict[str, str]:
    """The event's fields: type in brackets and meaning; a measured one's meaning is its metric's."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name in kind.__dataclass_fields__:
            plain, note = get_args(hint)[:2]
            text = f"`{_exported(note)}`" if isinstance(note, Metric) else note
            found[name] = f"({formatannotation(plain).replace('| None', 'or null')}): {text}"
    return found


def metrics_list() -> str:
    """The metrics, each with its labels."""
    labels = {metric: f"{{{','.join(metric.labels)}}}" if metric.labels else "" for metric in METRICS}
    return "\n".join(f"- `{_exported(metric)}{labels[metric]}`: {metric.help}" for metric in METRICS)


LISTS: dict[str, Callable[[], str]] = {"events": events_list, "metrics": metrics_list}


def renewed(text: str) -> str:
    """Return the page's text, with what stands between `<!-- NAME -->` and `<!-- end -->` made anew."""
    for name, made in LISTS.items():
        block = f"<!-- {name} -->\n{made()}\n<!-- end -->".replace("\\", r"\\")
        text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", block, text, flags=re.DOTALL)
    return text


def _exported(metric: Metric) -> str:
    """The metric's name in Prometheus."""
    (family,) = collector(metric).describe()
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    text = renewed(page.read_text(encoding="utf-8"))
    with whole_file(page) as file:
        file.write(text)
