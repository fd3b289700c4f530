"""One region's process of `benchmarks.rivals`: the same training loop for every method.

    python -m benchmarks.rivals.worker TASK.json REGION

It trains alone first and last, both regions at the same time, which is what the method's speed is compared with.
Marks are lines of JSON in a file of the run's folder, times of the monotonic clock, which all processes of a machine
share.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rivals.methods import METHODS
from benchmarks.rivals.task import REGIONS, Task, load, new_model, rate_at, samples_of, save

GO_S = 300.0
CLONE_NEWUTS = 0x04000000


class Marks:
    """Writes what this process tells: lines of JSON, and files that the other one waits for."""

    def __init__(self, folder: Path, region: str) -> None:
        self.folder, self.region = folder, region
        self.file = (folder / f"{region}.jsonl").open("a", buffering=1)

    def tell(self, what: str, **numbers: Any) -> None:
        self.file.write(json.dumps({"what": what, "at_s": time.monotonic(), **numbers}) + "\n")

    def meet(self, what: str) -> None:
        """Wait until both regions are here."""
        (self.folder / f"{what}-{self.region}").touch()
        deadline = time.monotonic() + GO_S
        while not all((self.folder / f"{what}-{region}").exists() for region in REGIONS):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other region did not come to {what!r} within {GO_S:g} s")
            time.sleep(0.005)


class Trainer:
    """model, optimizer, data; the step without any communication."""

    def __init__(self, task: Task) -> None:
        self.data = torch.from_numpy(np.load(task.data)["train"])
        order = np.random.default_rng(task.seed).permutation(len(self.data))
        self.order = torch.from_numpy(order)
        self.rate = task.rate
        self.model = new_model(Path(task.data).with_name(f"start-{task.seed}.safetensors"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, module: Any, optimizer: Any, progress: float, samples: range) -> float:
        """forward, backward, clipping, the optimizer's step. module: the model, or what wraps it."""
        for group in self.optimizer.param_groups:  # hivemind's own are copies
            group["lr"] = rate_at(progress, self.rate)
        places = self.order[torch.arange(samples.start, samples.stop) % len(self.order)]
        tokens = self.data[places].long()
        loss = module(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())


def alone(trainer: Trainer, task: Task, marks: Marks, when: str) -> None:
    """Train a while without communication, on weights that are thrown away; each step's seconds."""
    marks.meet(f"alone-{when}")
    seconds, cpu_s = [], time.process_time()
    for number, samples in enumerate(samples_of(0, task.alone_steps)):
        begin = time.perf_counter()
        trainer.step(trainer.model, trainer.optimizer, number / task.schedule_steps, samples)
        seconds.append(time.perf_counter() - begin)
    marks.tell("alone", seconds=seconds[1:], cpu_s=(time.process_time() - cpu_s) / task.alone_steps)


def interface_bytes() -> int:
    """Received and sent at this namespace's emulated devices."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    counts = [line.split(":") for line in lines if line.strip().startswith("geo")]
    return sum(int(numbers.split()[at]) for _, numbers in counts for at in (0, 8))


def take_name(address: str) -> None:
    """Call this machine by its region's address, for this process: torchft tells its peers the machine's name, by
    which they then fetch weights."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "no namespace for a host name")
    socket.sethostname(address)


def main(path: str, region: str) -> None:
    task = Task.read(Path(path))
    take_name(task.addresses[region])
    folder = Path(task.folder)
    torch.set_num_threads(1)
    marks = Marks(folder, region)
    again = (folder / f"joined-{region}").exists()  # this is not its first incarnation
    trainer = Trainer(task)
    if not again and task.alone_steps:
        alone(trainer, task, marks, "before")
        trainer = Trainer(task)
    method: Any = METHODS[task.method](task, region, trainer.model, trainer.optimizer)
    snapshots: list[tuple[int, list[tuple[str, torch.Tensor]]]] = []
    if not again:
        marks.meet("joined")
    marks.tell("begin", bytes=interface_bytes(), again=again, thread_s=time.thread_time())
    number = 0
    for progress, samples in method.steps():
        loss = trainer.step(method.module, method.optimizer, progress, samples)
        method.after_step(loss)
        number += 1
        marks.tell("step", number=number, thread_s=time.thread_time(), loss=loss)
        if number % task.snapshot_every == 0:
            snapshots.append((number, [(n, p.detach().clone()) for n, p in trainer.model.named_parameters()]))
    method.finish()
    marks.tell("end", bytes=interface_bytes(), steps=number, **method.told())
    for at, values in snapshots if region == REGIONS[0] else ():
        save(values, folder / f"after-{at}.safetensors")
    if region == REGIONS[0] and (final := method.final()) is not None:
        save(final, folder / "final.safetensors")
    if task.alone_steps and not again:
        marks.meet("ended")
        method.close()
        load(trainer.model, Path(task.data).with_name(f"start-{task.seed}.safetensors"))
        alone(trainer, task, marks, "after")
    else:
        method.close()
    marks.tell("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
