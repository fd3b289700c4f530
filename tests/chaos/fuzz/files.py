"""Mutated files against what opens them: configs, journals, snapshots, .idx (a part of the fuzzer)."""

from __future__ import annotations

import json
import random
import shutil
from abc import ABC, abstractmethod
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from geotrain.config import (
    ClusterConfig,
    ConfigError,
    RunConfig,
    UnsupportedModelError,
    load_cluster,
    load_run,
    parse,
)
from geotrain.data.dataset import Manifest, manifest_path, open_dataset
from geotrain.data.tokens import DataError, TokenWriter, open_tokens
from geotrain.launch.check import check_together
from geotrain.launch.preflight import cautions
from geotrain.net.storage.journal import JournalDamaged
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.net.storage.snapshots import StoreError
from geotrain.outer.messages import LeaseRequest
from geotrain.outer.server.region_server import RegionServer
from tests.chaos.fuzz.messages import ODD, Servers, digest, places

CONFIGS = ROOT / "configs"
RUN, CLUSTER = CONFIGS / "runs" / "quickstart.json", CONFIGS / "clusters" / "local-two-regions.json"


def damage(rng: random.Random, content: bytes) -> bytes:
    """Some of its bytes flipped, cut, doubled, zeroed or replaced."""
    body = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        kind, at = rng.randrange(6), rng.randrange(len(body)) if body else 0
        if kind == 0 and body:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del body[at:]
        elif kind == 2:
            body[at:at] = body[at : at + rng.randrange(64)]
        elif kind == 3:
            body[at : at + 32] = bytes(len(body[at : at + 32]))
        elif kind == 4:
            body[at : at + 8] = rng.randbytes(min(8, len(body) - at))
        else:
            body += rng.randbytes(rng.randrange(64))
    return bytes(body)


class Configs:
    """Run and cluster files of this repository with keys and values changed, or bytes: read, and checked together
    with the other half as before a launch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._path = folder / "config.json"
        self._samples: list[tuple[Any, Any]] = []
        for path in sorted([*CONFIGS.glob("runs/*.json"), *CONFIGS.glob("clusters/*.json")]):
            kind = RunConfig if path.parent.name == "runs" else ClusterConfig
            raw = json.loads(path.read_text())
            if kind is RunConfig and isinstance(raw["model"]["config"], str):
                raw["model"]["config"] = json.loads((path.parent / raw["model"]["config"]).read_text())
            parse(kind, raw, str(path))
            self._samples.append((load_run if kind is RunConfig else load_cluster, raw))
        assert self._samples, "no configs to begin from"
        self._run, self._cluster = load_run(RUN), load_cluster(CLUSTER)

    def attempt(self, rng: random.Random) -> str:
        load, raw = rng.choice(self._samples)
        text = json.dumps(raw)
        if rng.random() < 0.2:
            content = damage(rng, text.encode())
        else:
            changed = json.loads(text)
            for _ in range(rng.randint(1, 3)):
                holder, key = rng.choice(list(places(changed)))
                value = deepcopy(rng.choice([v for v in ODD if not isinstance(v, bytes)]))
                if isinstance(holder, dict) and rng.random() < 0.3:
                    holder[rng.choice(["nmae", "", "x" * 300, key + "s"])] = holder.pop(key)
                else:
                    holder[key] = value
            content = json.dumps(changed).encode()
        self._path.write_bytes(content)
        try:
            loaded = load(self._path)
        except ConfigError as error:
            said = str(error)
            clear = (
                said.startswith((str(self._path), str(self._path.parent))) and len(said) > len(str(self._path)) + 10
            )
            return "refused" if clear else f"unclear: {said[:300]}"
        run, cluster = (loaded, self._cluster) if isinstance(loaded, RunConfig) else (self._run, loaded)
        try:
            check_together(run, cluster)
            cautions(run, cluster)
        except (ConfigError, UnsupportedModelError) as error:
            return "refused" if len(str(error)) > 20 else f"unclear: {error}"
        return "taken"


class _Folders(ABC):
    """A server's folder as it was left, and the state that is to come back from it."""

    def __init__(self, folder: Path) -> None:
        self._whole, self._copy = folder / "whole", folder / "copy"
        servers = Servers()
        self._start = servers.region.state()
        recovered = recover(self._build, self._begin, self._whole, keep=2)
        server, journal = recovered.server, recovered.journal
        messages = [servers.join("a"), servers.join("b"), servers.first_lease]
        messages += [servers.update("ab"[i % 2], i % 3, 1 + (i % 6 == 0) + i // 6, 0.1 * (i + 1)) for i in range(12)]
        messages += [LeaseRequest("a", 2)]
        for number, message in enumerate(messages):
            journal.append(message)
            journal.flush()
            server.handle(message)
            if number == 4:
                finish_snapshot(
                    recovered.store, journal, *begin_snapshot(server, recovered.store, journal, ended=False)
                )
        journal.close()
        again = recover(self._build, self._begin, self._whole, keep=2)
        again.journal.close()
        self._digest = digest(again.server)

    def _build(self) -> RegionServer:
        server: RegionServer = Servers().build("eu")
        return server

    def _begin(self, server: Any) -> None:
        tensors, meta = self._start
        server.load({name: tensor.clone() for name, tensor in tensors.items()}, meta)

    @abstractmethod
    def _victims(self, folder: Path) -> list[Path]:
        """The files of which one is damaged."""

    def attempt(self, rng: random.Random) -> str:
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._whole, self._copy)
        victim = rng.choice(self._victims(self._copy))
        if rng.random() < 0.05:
            victim.unlink()
        else:
            victim.write_bytes(damage(rng, victim.read_bytes()))
        try:
            recovered = recover(self._build, self._begin, self._copy, keep=2)
        except (JournalDamaged, StoreError) as error:
            return "refused" if str(self._copy) in str(error) else f"unclear: {error}"
        recovered.journal.close()
        if digest(recovered.server) != self._digest:
            return f"changed: {victim.name} {recovered.faults}"
        unclear = [fault for fault in recovered.faults if str(self._copy) not in fault]
        return f"unclear: {unclear}" if unclear else "taken"


class Journals(_Folders):
    """Damages the journal, whose every record was acknowledged: it comes back whole, or the server does not start."""

    def _victims(self, folder: Path) -> list[Path]:
        return sorted((folder / "journal").iterdir())


class Snapshots(_Folders):
    def _victims(self, folder: Path) -> list[Path]:
        return sorted(path for path in (folder / "snapshots").rglob("*") if path.is_file())


class Indexes:
    """The .idx file and the manifest of a data set; the tokens must be those that were written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._prefix = folder / "train"
        generator = np.random.default_rng(1)
        documents = [generator.integers(0, 50, size) for size in (5, 1, 90, 17, 30)]
        with TokenWriter(str(self._prefix), 50) as writer:
            for document in documents:
                writer.add_document(document)
        self._tokens = np.concatenate(documents)
        manifest = Manifest(tokens=len(self._tokens), documents=5, text_bytes=1000, vocab_size=50, end_of_document=0,
                            dtype="uint16", sha256="0" * 64, tokenizer="tokenizer")  # fmt: skip
        manifest_path(self._prefix).write_text(manifest.model_dump_json(indent=1))
        names = [self._prefix.with_suffix(".idx"), self._prefix.with_suffix(".bin"), manifest_path(self._prefix)]
        self._files = {path: path.read_bytes() for path in names}

    def attempt(self, rng: random.Random) -> str:
        index, data, manifest = self._files
        victim = rng.choice([index, index, index, data, manifest])
        for path, content in self._files.items():
            path.write_bytes(content)
        # Its bytes are checked by `geotrain launch` against the manifest's digest, not at each open.
        if victim == data:
            data.write_bytes(self._files[data][: rng.randrange(len(self._files[data]))])
        else:
            victim.write_bytes(damage(rng, self._files[victim]))
        try:
            open_dataset(self._prefix, 50)
            file = open_tokens(self._prefix)
            tokens, ends = np.array(file.tokens), file.document_ends(0, file.documents)
        except DataError as error:
            return "refused" if str(self._prefix) in str(error) else f"unclear: {error}"
        same = np.array_equal(tokens, self._tokens) and ends[-1] == len(tokens) and (np.diff(ends) >= 0).all()
        return "taken" if same else f"changed: {victim.name}"
