"""docs/monitoring.md speaks of the events, metrics and alerts that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from geotrain.monitor.events import KINDS
from geotrain.outer.events import Event
from tests.support.monitoring_tables import described_fields, renewed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "monitoring.md"


def test_the_lists_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text) == text, "run: python -m tests.support.monitoring_tables docs/monitoring.md"
    for kind in KINDS:
        assert f"- **{kind}**" in text
    assert "- `geotrain_link_bytes_total{member,direction}`: " in text
    assert "- **Left** (`member`): " in text and "  - `mfu` (float or null): `geotrain_mfu_ratio`" in text


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_field_of_every_event_is_described(kind: type[Event]) -> None:
    for name, text in described_fields(kind).items():
        assert re.fullmatch(r"\(.+\): .+", text), f"{kind.__name__}.{name}"


def test_alerts_are_all_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    alerts = yaml.safe_load((ROOT / "configs/monitoring/alerts.yaml").read_text())
    named = [rule["alert"] for group in alerts["groups"] for rule in group["rules"]]
    section = text.partition("## Prometheus and Grafana")[2].partition("<!-- metrics -->")[0]
    assert sorted(named) == sorted(re.findall(r"^- \*\*(\w+)\*\*", section, flags=re.MULTILINE))
    for path in re.findall(r"\(images/([^)]+)\)", text):
        image = PAGE.parent / "images" / path
        assert 10_000 < image.stat().st_size < 300_000
