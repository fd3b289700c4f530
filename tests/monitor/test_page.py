"""The status page in a real browser, served by a real global server with a real region below it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from geotrain.monitor.events import (
    LivenessChanged,
    MemberSampled,
    Record,
    Trouble,
    WaitsChanged,
)
from geotrain.monitor.history import History
from geotrain.monitor.http import HttpServer
from geotrain.monitor.page import page_routes
from geotrain.outer.events import UpdateRefused, ValidationDone
from tests.support.chromium import Chromium
from tests.support.net_worlds import BUSY_S
from tests.support.server_processes import Site
from tests.support.synthetic_events import a_merge, synthetic_events, synthetic_facts

POINTS = "Number(document.querySelector('#loss-curve')?.dataset.points ?? 0)"
STATE = "document.querySelector('[data-member=eu]')?.dataset.state ?? ''"
BROWSER = pytest.mark.long("geotrain/monitor", "tests/support/chromium.py")  # what only a person sees
HEALTH = "document.querySelector('#health').textContent.trim()"


@pytest.fixture
def chromium() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


class Training(threading.Thread):
    """A worker that trains until it is told to stop."""

    def __init__(self, site: Site, incarnation: str) -> None:
        super().__init__(daemon=True)
        self.worker, self.enough = site.worker("a", incarnation), threading.Event()

    def run(self) -> None:
        try:
            self.worker.join()
            while not self.enough.is_set() and (lease := self.worker.lease()):
                self.worker.train(lease)
                time.sleep(0.05)
        except Exception:  # of servers that the test's end has killed
            if not self.enough.is_set():
                raise

    def end(self) -> None:
        self.enough.set()
        self.join(BUSY_S)
        self.worker.close()


@pytest.mark.slow
def test_the_page_follows_a_live_run(tmp_path: Path, chromium: Chromium) -> None:
    site = Site(tmp_path, train_samples=4000)
    run = json.loads((tmp_path / "run.json").read_text())
    run |= {"folder": str(tmp_path), "monitor": {"sample_s": 1.0, "metrics_port": 0, "tensorboard": "boards"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    training = Training(site, "life-1")
    try:
        site.serve("global")
        region = site.serve("eu")
        url = site.status("global")["page"]
        assert url.startswith("http://127.0.0.1:")
        training.start()
        chromium.open(url)
        first = chromium.wait_for(POINTS, good=lambda n: n >= 2)
        curve = chromium.evaluate("document.querySelector('#loss-curve').getAttribute('d')")
        chromium.wait_for(POINTS, good=lambda n: n > first)
        assert chromium.evaluate("document.querySelector('#loss-curve').getAttribute('d')") != curve
        chromium.wait_for(STATE, good=lambda state: state == "up")
        chromium.wait_for(HEALTH, good=lambda text: text == "training")
        assert float(chromium.evaluate("document.querySelector('#figure-loss dd span').textContent")) > 0
        chromium.wait_for("document.querySelector('.c-link').textContent", good=lambda text: "kB/s" in text)
        training.end()  # without a goodbye: its region's server goes on
        chromium.wait_for(STATE, good=lambda state: state == "no worker")
        chromium.wait_for(HEALTH, good=lambda text: text == "no worker of eu is here")
        region.send(signal.SIGKILL)
        chromium.wait_for(STATE, good=lambda state: state == "cut off")
        chromium.wait_for(HEALTH, good=lambda text: text.startswith("eu cut off"))
        site.serve("eu", resume=True)
        chromium.wait_for(STATE, good=lambda state: state == "no worker")
        marks = chromium.evaluate("document.querySelector('#marks').textContent")
        assert "silent for" in marks and "joined" in marks and "1 of its workers cut off" in marks

        assert chromium.complaints == []
        assert {request for request in chromium.requests if not request.startswith(url)} <= {"about:blank"}
        assert list((tmp_path / "boards").glob("events.out.tfevents.*"))
        site.servers[0].send(signal.SIGKILL)
        chromium.wait_for(HEALTH, good=lambda text: "has not answered" in text)
        assert chromium.evaluate(POINTS) > first, "what was known stays"
    finally:
        training.enough.set()
        site.kill()


@pytest.fixture
def page() -> Iterator[str]:
    """A page of ten regions, one of them lost, some slow."""
    facts, now_s = synthetic_facts(10, 0.5), time.time()
    history = History(facts, "test")
    for record in synthetic_events(facts, now_s, 0.5):
        history.on(record)
    server = HttpServer("127.0.0.1", 0, page_routes(history))
    server.start()
    yield server.url
    server.stop()


@BROWSER
@pytest.mark.parametrize(("width", "phone"), [(360, True), (768, True), (1440, False)])
def test_nothing_is_wider_than_the_screen(chromium: Chromium, page: str, width: int, phone: bool) -> None:
    chromium.resize(width, 800, phone)
    chromium.open(page)
    chromium.wait_for(POINTS, good=lambda n: n >= 2)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    beyond = """[...document.querySelectorAll('main *')].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width > 0 && box.right > innerWidth + 1 }).map((e) => e.id)"""
    assert chromium.evaluate(beyond) == []
    assert chromium.complaints == []


@BROWSER
@pytest.mark.parametrize("regions", [1, 2])
def test_few_regions_fill_their_map_and_long_numbers_their_tiles(chromium: Chromium, regions: int) -> None:
    facts, now_s = replace(synthetic_facts(regions, 0.1), target_tokens=15_300_000_000_000), time.time()
    history = History(facts, "test")
    for event in (
        LivenessChanged("region-00", "cut off", 30.0),
        ValidationDone("region-00", 1, 1, 1234.5678, 1.0, 10),
        WaitsChanged([{"what": "lease", "whom": "region-00", "text": "the 3 leases", "since_s": now_s}]),
        *(a_merge(Random(0), "region-00", 0, 0, [1], -0.8, tokens) for tokens in (10**12, 12 * 10**12)),
        MemberSampled("region-00", 0.1, 10**13, 10**13, 123456789.0, 987654321.0, 0, {}),
    ):
        history.on(Record(now_s, "global", event))
    server = HttpServer("127.0.0.1", 0, page_routes(history))
    server.start()
    try:
        for width in (360, 900, 1100, 1440):
            chromium.resize(width, 800, width == 360)
            chromium.open(server.url)
            chromium.wait_for("document.querySelector('#waits')?.textContent", good=lambda text: "3 leases" in text)
            over = """[...document.querySelectorAll('.figure dd, .figure p, .name')]
                .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""
            assert chromium.evaluate(over) == [], width
            filled = """(() => { const card = document.querySelector('#map').getBoundingClientRect();
                const drawn = [...document.querySelectorAll('#map .node, #map .hub')].map(
                    (e) => e.getBoundingClientRect());
                const [low, high] = [Math.min(...drawn.map((b) => b.top)), Math.max(...drawn.map((b) => b.bottom))];
                const [left, right] = [Math.min(...drawn.map((b) => b.left)), Math.max(...drawn.map((b) => b.right))];
                return [(high - low) / card.height, (left + right) / 2 - (card.left + card.right) / 2]; })()"""
            share, beside = chromium.evaluate(filled)
            assert share > 0.5 and abs(beside) < 40, f"{width}: the map is empty: {share}, {beside}"
        history.on(Record(now_s, "global", LivenessChanged("region-00", "stalled", 0.0)))
        chromium.wait_for(HEALTH, good=lambda text: text.startswith("region-00 stalled"))
        assert chromium.complaints == []
    finally:
        server.stop()


@BROWSER
def test_controls_and_tooltips(chromium: Chromium, page: str) -> None:
    chromium.open(page)
    chromium.wait_for(POINTS, good=lambda n: n >= 2)
    everything = chromium.evaluate(POINTS)
    assert chromium.evaluate("document.querySelectorAll('#loss circle.validation').length") == 1
    assert "validated" in chromium.evaluate("document.querySelector('#figure-loss').textContent")
    chromium.evaluate("document.querySelector('[data-part=\"0.1\"]').click()")
    assert chromium.evaluate(POINTS) < everything / 3
    chromium.evaluate("document.querySelector('[data-x=time]').click()")
    assert "local time" in chromium.evaluate("document.querySelector('#loss').textContent")
    slow = "document.querySelector('[data-member=region-07] .badge').textContent"
    assert "slow" in chromium.evaluate(slow) or "lost" in chromium.evaluate(slow)
    box = chromium.evaluate("(({x, y, width, height}) => [x + width / 2, y + height / 2])"
                            "(document.querySelector('#loss svg').getBoundingClientRect())")  # fmt: skip
    chromium.command("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    chromium.wait_for("!document.querySelector('#tip').hidden && document.querySelector('#tip').textContent",
                      good=lambda text: text and "tokens" in text)  # fmt: skip
    assert chromium.complaints == []


def test_a_name_is_text_and_never_markup(chromium: Chromium) -> None:
    """Text from other machines must not run in the reader's browser."""
    facts = synthetic_facts(2, 0.1)
    history = History(facts, "test")
    for record in synthetic_events(facts, time.time(), 0.1):
        history.on(record)
    history.on(Record(time.time(), "global", Trouble("<img src=x onerror=alert(1)>")))
    history.on(Record(time.time(), "global", UpdateRefused("region-00", "<script>alert(1)</script>", 1)))
    server = HttpServer("127.0.0.1", 0, page_routes(history))
    server.start()
    try:
        chromium.open(server.url)
        chromium.wait_for("document.querySelector('#marks').textContent", good=lambda text: "<script>" in text)
        assert chromium.evaluate("document.querySelectorAll('#marks img, #marks script').length") == 0
    finally:
        server.stop()
