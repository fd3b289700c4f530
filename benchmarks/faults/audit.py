"""What a faulty run must have kept, recomputed from its servers' whole journals by an uninterrupted replay.

The chain: one server replays all segments from the run's first, through all its lives. It is compared with each
snapshot that the living server wrote, and at each restart with what recovery rebuilds there: newest snapshot, then
the journal. Bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.faults.runner import FaultyRun
from geotrain.config import load_run
from geotrain.layout import layout_of
from geotrain.net.journal import Journal
from geotrain.net.recovery import KINDS, Restarted, Stopped, end_lives
from geotrain.net.server_process import initial_weights
from geotrain.net.snapshots import Snapshot, SnapshotStore
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import Refused, UpdatePart
from geotrain.outer.region_server import RegionServer
from geotrain.outer.rules import region_rule, updates_in_run
from geotrain.outer.server import Server, identity_of


@dataclass
class Replay:
    """One server's history. applied: (member, incarnation, sequence, digest of its payloads) of each update.
    committed: ranges of samples (global server). deaths: restarts that the journal tells of."""

    server: Server
    applied: list[tuple[str, str, int, str]] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)
    deaths: int = 0
    snapshots: int = 0
    mismatches: list[str] = field(default_factory=list)


def build(run: FaultyRun, site: str) -> Server:
    """As `geotrain serve` makes it, without state."""
    config, layout = load_run(run.folder / "run.json"), layout_of(run.run)  # as launched: with the data's digest
    identity = identity_of(config, layout)
    regions = {name: tuple(workers) for name, workers in run.regions.items()}
    samples = config.data.train_samples, config.samples_per_step
    if site == "global":
        return GlobalServer(identity, layout, config.outer, regions, *samples)
    everyone = sum(len(workers) for workers in regions.values())
    updates = updates_in_run(*samples, config.outer.local_steps, len(regions[site]), everyone)
    rule = region_rule(config.outer.rule, regions[site], updates)
    return RegionServer(site, identity, layout, config.outer, rule, regions[site])


def replay(run: FaultyRun, site: str) -> Replay:
    chain = build(run, site)
    if site == "global":
        chain.set_weights(initial_weights(run.run, chain.layout))
    history = Replay(chain)
    written = {_read(path).meta["segment"]: path for path in (run.archive / site / "snapshots").iterdir()}
    shadow: Server | None = None  # what recovery would have
    digests: dict[tuple[str, int], str] = {}
    for segment, messages in _segments(run, site):
        if segment in written:
            history.snapshots += 1
            saved = _read(written[segment])
            _compare(history, chain, saved.tensors, saved.meta["state"], f"snapshot {saved.number}")
            shadow = build(run, site)
            shadow.load({k: t.clone() for k, t in saved.tensors.items()}, saved.meta["state"])
        for message in messages:
            if isinstance(message, Restarted):
                if shadow is not None:
                    history.deaths += 1
                    _compare(history, chain, *shadow.state(), f"restart {history.deaths}")
                chain = history.server = _again(build(run, site), chain)
                shadow = None if shadow is None else _again(build(run, site), shadow)
                continue
            if isinstance(message, Stopped):
                for server in (chain, *([] if shadow is None else [shadow])):
                    end_lives(server)
                continue
            if shadow is not None:
                _tell(shadow, message)
            _note(history, message, digests)
    return history


def _again(fresh: Server, server: Server) -> Server:
    """What is left of a server when its process dies."""
    fresh.load(*server.state())
    return fresh


def _tell(server: Server, message: Any) -> Any:
    with suppress(Refused):
        return server.handle(message).reply
    return None


def _note(history: Replay, message: Any, digests: dict[tuple[str, int], str]) -> None:
    server = history.server
    book = getattr(server, "book", None)  # the global server's
    before = dict(book.open) if book else {}
    reply = _tell(server, message)
    if not isinstance(message, UpdatePart):
        return
    key = message.member, message.sequence
    text = b"".join(bytes(d.payload) for d in message.deltas)
    digests[key] = hashlib.sha256(digests.get(key, "").encode() + text).hexdigest()
    if reply:
        history.applied.append((message.member, message.incarnation, message.sequence, digests[key]))
        if book:
            done = [before[n] for n in message.leases if n in before and n not in book.open]
            history.committed += [(lease.start, lease.samples) for lease in done]


def _compare(history: Replay, chain: Server, tensors: Any, meta: Any, what: str) -> None:
    ours, state = chain.state()
    plain = json.loads(json.dumps(state))
    other = json.loads(json.dumps(meta))
    differing = list(_paths(plain, other))
    differing += [name for name in ours.keys() | tensors.keys() if not _equal(ours.get(name), tensors.get(name))]
    if differing:
        history.mismatches.append(f"{what}: {', '.join(sorted(differing)[:5])}")


def _paths(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _paths(one.get(key), other.get(key), f"{at}.{key}" if at else key)
    elif one != other:
        sorted_too = (
            isinstance(one, list) and isinstance(other, list) and sorted(map(str, one)) == sorted(map(str, other))
        )
        yield f"{at} (in its order only)" if sorted_too else at


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)


def _segments(run: FaultyRun, site: str) -> Iterator[tuple[int, Iterator[Any]]]:
    """(number, messages) of each segment of the journal. Each is read in a folder of its own, because the journal's
    reader refuses gaps, and the first segment may be missing: it ends before a new server listens, so that the server
    may drop it before it was linked into the archive.
    """
    folder = run.archive / site / "journal"
    limit_bytes = 8 * layout_of(run.run).numel + 65536
    paths = sorted(folder.glob("*.journal"))
    numbers = [int(path.stem) for path in paths]
    if not numbers or numbers[0] > 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise AssertionError(f"{folder}: the archive has gaps: {numbers}")
    for path in paths:
        with tempfile.TemporaryDirectory() as alone:
            os.link(path, Path(alone) / path.name) if _same_disk(path, alone) else _copy(path, Path(alone))
            journal = Journal(Path(alone), KINDS, limit_bytes)
            yield int(path.stem), journal.replay(int(path.stem), is_whole=False)
            journal.close()


def _same_disk(path: Path, folder: str) -> bool:
    return path.stat().st_dev == Path(folder).stat().st_dev


def _copy(path: Path, folder: Path) -> None:
    (folder / path.name).write_bytes(path.read_bytes())


def _read(snapshot: Path) -> Snapshot:
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / snapshot.name).symlink_to(snapshot.absolute(), target_is_directory=True)
        found, faults = SnapshotStore(Path(alone)).load_newest()
        assert found is not None, faults
        return found


# ---------------------------------------------------------------------------------------------- the accounts


def accounts(run: FaultyRun) -> dict[str, Any]:
    """The figures of a run that has ended."""
    histories = {site: replay(run, site) for site in ("global", *run.regions)}
    top = histories["global"]
    acknowledged = lost = twice = 0
    for region, workers in run.regions.items():
        below = histories[region]
        told = {(w, e["life"], e["sequence"]) for w in workers for e in _acknowledgements(run, w)}
        lost += len(told - {(m, life, sequence) for m, life, sequence, _ in below.applied})
        told_up = {e["sequence"] for e in _acknowledgements(run, region)}
        lost += len(told_up - {sequence for m, _, sequence, _ in top.applied if m == region})
        lost += below.server.lost_updates
        acknowledged += len(told) + len(told_up)
    for history in histories.values():
        numbers = Counter((member, sequence) for member, _, sequence, _ in history.applied)
        contents = Counter((member, digest) for member, _, _, digest in history.applied)
        twice += max(sum(numbers.values()) - len(numbers), sum(contents.values()) - len(contents))
    book = cast(GlobalServer, top.server).book
    out = [(lease.start, lease.samples) for lease in book.open.values()]
    once, overlapping = coverage([*top.committed, *book.pool, *out])
    return {
        "acknowledged_updates": acknowledged,
        "lost_acknowledged": lost,
        "applied_twice": twice,
        "replay_mismatches": sum(len(h.mismatches) for h in histories.values()),
        "mismatches": [f"{site}: {text}" for site, h in histories.items() for text in h.mismatches][:10],
        "server_deaths": sum(h.deaths for h in histories.values()),
        "snapshots_compared": sum(h.snapshots for h in histories.values()),
        "samples_skipped": book.next_start - once,
        "samples_twice_uncounted": overlapping,
        "committed_samples": book.committed_samples,
    }


def coverage(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    """(samples in any of the ranges (start, length), samples counted again)."""
    once = again = end = 0
    for start, length in sorted(ranges):
        fresh = max(0, start + length - max(start, end))
        once, again, end = once + fresh, again + length - fresh, max(end, start + length)
    return once, again


def _acknowledgements(run: FaultyRun, source: str) -> list[dict[str, Any]]:
    return [e for e in run.events(source) if e["event"] == "Acknowledged"]
