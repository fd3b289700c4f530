"""docs/monitoring.md speaks of the events, metrics, alerts and settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from geotrain.config import MonitorConfig
from geotrain.monitor.events import KINDS
from tests.support.monitoring_tables import events_table, renewed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "monitoring.md"


def test_the_tables_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert renewed(text) == text, "run: python -m tests.support.monitoring_tables docs/monitoring.md"
    for kind in KINDS:
        assert f"**{kind}**" in text
    assert "`geotrain_link_bytes_total` | counter | member, direction |" in text


def test_every_field_of_every_event_is_described() -> None:
    for row in events_table().splitlines()[2:]:
        assert all(cell.strip() for cell in row.split("|")[4:5]), row


def test_settings_and_alerts_are_all_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for key in MonitorConfig.model_fields:
        assert f"| `{key}` |" in text
    alerts = yaml.safe_load((ROOT / "configs/monitoring/alerts.yaml").read_text())
    named = {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
    assert named == set(re.findall(r"^\| ([A-Z]\w+) \| ", text, flags=re.MULTILINE)) & named
    for path in re.findall(r"\(images/([^)]+)\)", text):
        image = PAGE.parent / "images" / path
        assert 10_000 < image.stat().st_size < 300_000
