"""Subjects that are crashed: servers with their journals and snapshots, a worker's checkpoints, an export, a data
set.

Each has `live`: an incarnation in a folder, which says a number for each thing that it has acknowledged; `again`:
one that begins with what an earlier one left, and acknowledges nothing new; `look`, which says what the folder gives,
as a digest; and `right`: whether that is right after so many acknowledgements.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import tokenizers
import torch

from geotrain.checkpoint.folders import CheckpointError
from geotrain.checkpoint.saving import Checkpoints
from geotrain.common.files import out_of_room, whole_folder
from geotrain.common.names import GLOBAL
from geotrain.config import architecture_from_hf
from geotrain.data import prepare as data_prepare
from geotrain.data.dataset import open_dataset
from geotrain.data.tokenizer import byte_tokenizer, load_tokenizer
from geotrain.inner.runtime.shards import OwnedShard
from geotrain.net.storage.journal import JournalFull
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.optimizers.inner_optimizer import InnerOptimizer
from geotrain.outer.messages import Refused
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.parallelism.optimizer_settings import AdamWSettings
from geotrain.parameters.hf_checkpoint import read_checkpoint
from geotrain.parameters.hf_export import write_checkpoint
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, canonical_parameters
from tests.chaos.crash_points.disk import SHIM
from tests.chaos.fuzz.messages import Servers

Say = Callable[[Any], None]
UPDATES = 3
SNAPSHOT_EVERY = 6  # messages
WRITES = 3  # of a whole folder


class ServerSubject:
    """A server that is told some messages, and takes snapshots in between. which: GLOBAL, or a region."""

    def __init__(self, which: str) -> None:
        servers = Servers()
        self._build, self._begin, self.messages = partial(servers.build, which), servers.begin, _messages(which)
        server = self._build()
        self._begin(server)
        self.states = [_digest(server)]
        for message in self.messages:
            with suppress(Refused):
                server.handle(message)
            self.states.append(_digest(server))
        assert len(set(self.states)) > UPDATES, "these messages change too little"

    def live(self, folder: Path, say: Say) -> None:
        recovered = recover(self._build, self._begin, folder, keep=2)
        for number, message in enumerate(self.messages, 1):
            try:
                recovered.journal.append(message)
                recovered.journal.flush()
            except JournalFull:
                break  # refused: whoever said it tries again later
            with suppress(Refused):
                recovered.server.handle(message)
            say(number)
            if number % SNAPSHOT_EVERY == 0:
                self._snapshot(recovered)
        recovered.journal.close()

    def again(self, folder: Path, say: Say) -> None:
        recovered = recover(self._build, self._begin, folder, keep=2)
        self._snapshot(recovered)
        recovered.journal.close()

    def look(self, folder: Path, say: Say) -> None:
        recovered = recover(self._build, self._begin, folder, keep=2)
        say(_digest(recovered.server))
        recovered.journal.close()

    def right(self, acknowledged: int, digest: int) -> bool:
        """The message that was being written may be there or not."""
        return digest in self.states[acknowledged : acknowledged + 2]

    def _snapshot(self, recovered: Any) -> None:
        try:
            copy = begin_snapshot(recovered.server, recovered.store, recovered.journal, ended=False)
            finish_snapshot(recovered.store, recovered.journal, *copy)
        except OSError as error:
            if not out_of_room(error):  # without room the server goes on, and tries again later
                raise


def _messages(which: str) -> list[Any]:
    """Messages that a server of that name receives in a small run."""
    told: dict[str, list[Any]] = {GLOBAL: [], "eu": []}
    kinds = {GLOBAL: GlobalServer, "eu": RegionServer}
    real = {name: kind.handle for name, kind in kinds.items()}  # type: ignore[attr-defined]

    def noting(name: str) -> Any:
        def handle(server: Any, message: Any) -> Any:
            told[name].append(message)
            return real[name](server, message)

        return handle

    with patch.object(GlobalServer, "handle", noting(GLOBAL)), patch.object(RegionServer, "handle", noting("eu")):
        servers = Servers()
        for number in range(2, 2 + UPDATES):
            for fragment in range(len(servers.parameter_map.fragments)):
                update = servers.update("a", fragment, number, 0.01 * number)
                with suppress(Refused):
                    servers.tell("eu", replace(update, job=number, contains=()))
            servers.settle("eu")
    return told[which]


def _digest(server: Any) -> int:
    """Digest of what a server saves."""
    tensors, meta = server.state()
    found = zlib.crc32(repr(meta).encode())
    for name, tensor in tensors.items():
        found = zlib.crc32(tensor.contiguous().numpy().tobytes(), zlib.crc32(name.encode(), found))
    return found


# ----------------------------------------------------------------------------------------------- checkpoints

MODEL = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip
NUMEL = 4096
SAVES = 4


class Engine:
    """An engine, as far as a checkpoint needs it: one tensor and AdamW, on one rank."""

    def __init__(self) -> None:
        self.rank = 0
        self.weights = torch.nn.Parameter(torch.zeros(NUMEL))
        group = {"params": [self.weights], "is_matrices": False, "moments": AdamWSettings.moments}
        self.basic_optimizer = InnerOptimizer([{**group, "lr": 0.1, "weight_decay": 0.01}], AdamWSettings())
        self.architecture = architecture_from_hf(MODEL)
        self.mesh = SimpleNamespace(tp_size=1, pp_size=1, replicas=1, cp_size=1, ep_size=1, stage_layers=None)
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0

        self.device, self.residuals = self.weights.device, dict[int, torch.Tensor]()

    def settle(self) -> None: ...

    def read_until(self, wait: Callable[[], None]) -> None: ...

    def refresh(self) -> None: ...

    def shards(self) -> tuple[OwnedShard, ...]:
        run = StridedSlice(0, NUMEL, 0, 1, parameter="p")
        return (OwnedShard((run,), self.weights.detach(), True, self.weights, 0),)

    def train(self, number: int) -> None:
        self.weights.grad = torch.full((NUMEL,), float(number))
        self.basic_optimizer.step()
        self.global_steps += 1

    @property
    def digest(self) -> int:
        state = self.basic_optimizer.state[self.weights]
        return zlib.crc32(b"".join(state[name].numpy().tobytes() for name in ("exp_avg", "exp_avg_sq")))


class CheckpointSubject:
    """A worker of one rank that saves after each job, trains the next one meanwhile, and keeps two checkpoints."""

    def __init__(self) -> None:
        engine = Engine()
        self.states = [0]
        for job in range(1, SAVES + 1):
            engine.train(job)
            self.states.append(engine.digest)

    def _open(
        self, folder: Path, no_room: Callable[[CheckpointError], None] | None = None
    ) -> tuple[Any, Checkpoints]:
        engine: Any = Engine()
        return engine, Checkpoints(engine, folder / "checkpoints", keep=2, no_room=no_room)

    def live(self, folder: Path, say: Say) -> None:
        full: list[CheckpointError] = []
        engine, checkpoints = self._open(folder, full.append)
        for job in range(1, SAVES + 2):
            if job <= SAVES:
                engine.train(job)
            checkpoints.wait()
            if job > 1 and not full:
                say(job - 1)
            full.clear()
            if job <= SAVES:
                checkpoints.save(f"job-{job}", {"job": job})

    def again(self, folder: Path, say: Say) -> None:
        """Loads, and saves the same once more, as a job whose update was lost."""
        _, checkpoints = self._open(folder)
        found = checkpoints.load()
        if found is not None:
            with suppress(CheckpointError):
                checkpoints.save(f"job-{found['job']}", found)
                checkpoints.wait()

    def look(self, folder: Path, say: Say) -> None:
        engine, checkpoints = self._open(folder)
        say(engine.digest if checkpoints.load() is not None else 0)

    def right(self, acknowledged: int, digest: int) -> bool:
        return digest in self.states[acknowledged:]


# -------------------------------------------------------------------------------------------------- whole folders


class _NotNow(Exception):
    """Ends a writer of a folder before it has written anything."""


class FolderSubject:
    """Somebody who writes a folder that appears whole or not at all, again and again with other content.

    kind: of the folder, as `whole_folder` has it.
    """

    kind: str

    def write(self, folder: Path, version: int) -> None:
        raise NotImplementedError

    def version(self, folder: Path) -> int:
        """Version of a folder that is there. Raises whatever shows that it is not whole."""
        raise NotImplementedError

    def live(self, folder: Path, say: Say) -> None:
        for version in range(1, 1 + WRITES):
            self.write(folder / "out", version)
            say(version)

    def again(self, folder: Path, say: Say) -> None:
        """Writes once more what is there."""
        self.write(folder / "out", max(1, self._found(folder)))

    def look(self, folder: Path, say: Say) -> None:
        say(self._found(folder))

    def right(self, acknowledged: int, digest: int) -> bool:
        """Whether the state is right; what was being written may be there or not."""
        return digest in (acknowledged, acknowledged + 1)

    def _found(self, folder: Path) -> int:
        # Whoever was killed while it replaced the folder has left the older one aside; the next writer puts it back.
        with suppress(_NotNow), whole_folder(folder / "out", self.kind):
            raise _NotNow
        return self.version(folder / "out") if (folder / "out").exists() else 0


class ExportSubject(FolderSubject):
    """`geotrain export`: a Hugging Face checkpoint in several files."""

    kind = "export"

    def write(self, folder: Path, version: int) -> None:
        parameter_map = ParameterMap(canonical_parameters(architecture_from_hf(MODEL)))
        tensors = ((p.name, torch.full(p.shape, float(version))) for p in parameter_map.parameters)
        write_checkpoint(tensors, MODEL, folder, dtype="float32", max_shard_bytes=8192)

    def version(self, folder: Path) -> int:
        _, tensors = read_checkpoint(folder)
        [value] = {float(value) for _, tensor in tensors for value in tensor.unique()}
        return int(value)


class PrepareSubject(FolderSubject):
    """`geotrain prepare`: a data set of two splits, with its tokenizer. What tokenizes writes no files, and works in
    this process instead of a pool."""

    kind = "dataset"

    def __init__(self) -> None:
        def encode_all(blocks: Any, encoder: Any, processes: int) -> Any:
            loaded = encoder.load()
            yield from ((block, encoder.encode(loaded, block)) for block in blocks)

        data_prepare._encode_all = encode_all
        self.tokenizer = byte_tokenizer()
        self.texts = Path(tempfile.mkdtemp(prefix="geotrain-crash-texts-", dir=os.environ.get(SHIM)))
        for version in range(1, 1 + WRITES):
            lines = (json.dumps({"text": f"document {number} of version {version}"}) for number in range(20))
            (self.texts / f"{version}.jsonl").write_text("\n".join(lines))

    def write(self, folder: Path, version: int) -> None:
        data_prepare.prepare([self.texts / f"{version}.jsonl"], folder, self.tokenizer, validation_fraction=0.3)

    def version(self, folder: Path) -> int:
        versions = set()
        decode = tokenizers.Tokenizer.from_str(load_tokenizer(folder / "tokenizer").json).decode
        for split in ("train", "validation"):
            _, tokens = open_dataset(folder / split, self.tokenizer.vocab_size)
            text = decode(tokens[:].tolist(), skip_special_tokens=True)
            versions |= set(re.findall(r"of version (\d)", text))
        [version] = versions
        return int(version)
