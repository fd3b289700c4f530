"""GeoTrain in one file: two regions train one model over a slow link, and nobody waits for the slowest.

    python examples/mini.py

    global server     the run's weights; the ledger of the training data
      ▲ │             slow link: 4-bit deltas up, 4-bit changes of the weights down, both with error feedback
      │ ▼
    region servers    momentum; apply a worker's delta at once, send their own progress up after K of them
      ▲ │             fast link: fp32
      │ ▼
    workers           train H steps, send a delta fragment by fragment, train on while the answer travels

Everything is here but what a cluster needs: real sockets, disks, GPUs, many ranks a worker, lost messages. A server
is a state machine, `handle(sender, message) -> [(receiver, message), …]`, as in the product; threads and queues carry
the messages. `tests/examples/test_mini.py` holds these servers to the product's, bit for bit. Read it from above.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

GLOBAL = "global"

# ------------------------------------------------------------------------------------------------ 1. text and model


class Text:
    """Characters of a file. A sample is the characters before a place, and the one there; its number says which
    place, so workers need no common disk."""

    def __init__(self, path: Path, context: int = 16) -> None:
        self.data, self.context = torch.tensor([min(byte, 127) for byte in path.read_bytes()]), context

    def batch(self, numbers: range) -> tuple[Tensor, Tensor]:
        begins = torch.tensor(numbers) * 7919 % (len(self.data) - self.context)  # prime: neighbours lie apart
        windows = self.data[begins[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, -1]


class Model(nn.Module):
    """The next character from those before. Each matrix is a fragment: what is synchronized together."""

    def __init__(self, width: int = 16, hidden: int = 256, context: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = (128, width), (context * width, hidden), (hidden, hidden), (hidden, 128)
        self.matrices = nn.ParameterList(torch.randn(shape) * shape[0] ** -0.5 for shape in shapes)

    def forward(self, tokens: Tensor) -> Tensor:
        embedding, first, second, last = self.matrices
        x = torch.relu(embedding[tokens].flatten(1) @ first)
        return (x + torch.relu(x @ second)) @ last


def values(matrix: nn.Parameter) -> Tensor:
    """A copy of all elements, fp32, 1-D."""
    return matrix.detach().flatten().clone()


def write(matrix: nn.Parameter, new: Tensor) -> None:
    matrix.detach().copy_(new.view_as(matrix))


# ----------------------------------------------------------------------------------------- 2. four bits an element

BLOCK = 128  # elements that share a scale


def encode(v: Tensor) -> bytes:
    """fp32 values → a bf16 scale for each block, then 4 bits an element: a sign and a magnitude of 0 to 7."""
    rows = v.view(-1, BLOCK)
    largest = rows.abs().amax(1, keepdim=True)
    # The scale is rounded up to bf16 (the upper half of fp32's bits), so that no magnitude exceeds 7. A block whose
    # largest magnitude is below 2^-100 is coded as zeros, since its scale would be a denormal number.
    bits = ((largest * torch.tensor(1 / 7)).view(torch.int32) + 0xFFFF) >> 16 << 16
    scale = torch.where(largest < 2.0**-100, 0, bits).view(torch.float32)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    magnitude = (rows.abs() * inverse).round().clamp(max=7).to(torch.uint8)  # half to even
    codes = magnitude | (rows.signbit().to(torch.uint8) << 3)
    packed = codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)
    scales = (scale.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8).reshape(-1)
    padding = torch.zeros(-scales.numel() % 16, dtype=torch.uint8)
    return bytes(torch.cat([scales, padding, packed.reshape(-1)]).numpy())


def decode(payload: bytes, numel: int) -> Tensor:
    """The fp32 values that `encode` could express."""
    data, blocks = torch.frombuffer(bytearray(payload), dtype=torch.uint8), numel // BLOCK
    scale = (data[: 2 * blocks].view(torch.int16).to(torch.int32) << 16).view(torch.float32)[:, None]
    packed = data[-numel // 2 :].view(blocks, BLOCK // 2)
    codes = torch.cat([packed & 15, packed >> 4], 1)
    value = (codes & 7).to(torch.float32) * scale
    return torch.where(codes >= 8, -value, value).view(-1)


# ------------------------------------------------------------------------------------------------- 3. what is said


# Besides: ("join",), to get the first weights; ("lease", worker), a request; ("finished", worker), there is no data
# left; ("release", leases), others may train these; ("leave",), also said for a member that died.


@dataclass(frozen=True)
class Update:
    """The delta, anchor − weights now, of one fragment. From a worker: a tensor; from a region: a 4-bit payload.

    contains: leases all of whose training the sender's deltas of this fragment contain with this one.
    """

    fragment: int
    sequence: int
    delta: Any
    contains: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The fragment's weights. sequence: of the update that this answers; 0: the join.

    weights: a tensor; from the global server to a region that has them already: their change, a 4-bit payload.
    """

    fragment: int
    sequence: int
    weights: Any


@dataclass(frozen=True)
class Lease:
    """Samples start … start + samples − 1 are this worker's to train."""

    number: int
    worker: str
    start: int
    samples: int


Sends = list[tuple[str, Any]]  # (receiver, message)

# ------------------------------------------------------------------------------------------------- 4. global server


class Ledger:
    """Who trains which samples. A sample counts once all fragments of the global weights contain its training; till
    then its lease may come back, and others train it. So each counts once, whoever dies."""

    def __init__(self, samples: int, lease_samples: int, fragments: int) -> None:
        self.samples, self.size, self.next, self.fragments = samples, lease_samples, 0, fragments
        self.contained: dict[int, set[int]] = defaultdict(set)  # open lease → fragments that contain its training
        self.pool: list[tuple[int, int]] = []  # (start, samples) that came back
        self.open: dict[int, Lease] = {}
        self.numbers = self.committed = 0

    def grant(self, worker: str) -> Any:
        if self.pool:
            start, samples = self.pool.pop(0)
        else:
            start, samples = self.next, min(self.size, self.samples - self.next)
            self.next += samples
        if not samples:
            return "finished", worker
        self.numbers += 1
        self.open[self.numbers] = Lease(self.numbers, worker, start, samples)
        return self.open[self.numbers]

    def contain(self, leases: tuple[int, ...], fragment: int) -> None:
        for number in self.open.keys() & leases:  # others train those of who died
            self.contained[number].add(fragment)
            if len(self.contained[number]) == self.fragments:
                self.committed += self.open.pop(number).samples

    def release(self, leases: tuple[int, ...]) -> None:
        self.pool = sorted([*self.pool, *((back.start, back.samples) for back in map(self.open.pop, leases))])


class GlobalServer:
    """Holds the run's weights x. A region's delta moves them at once by one region's share: x −= Δ / regions."""

    def __init__(self, weights: list[Tensor], regions: int, ledger: Ledger) -> None:
        self.x, self.share, self.ledger = [w.clone() for w in weights], torch.tensor(1 / regions), ledger
        self.mirrors: dict[tuple[str, int], Tensor] = {}  # what that region has, after all changes sent so far

    def handle(self, sender: str, message: Any) -> Sends:
        match message:
            case ("join",):
                return [(sender, self.answer(sender, fragment, 0)) for fragment in range(len(self.x))]
            case Update(fragment, sequence, payload, leases):
                self.x[fragment] -= self.share * decode(payload, self.x[fragment].numel())
                self.ledger.contain(leases, fragment)
                return [(sender, self.answer(sender, fragment, sequence))]
            case ("lease", worker):
                return [(sender, self.ledger.grant(worker))]
            case ("release", leases):
                self.ledger.release(leases)
        return []

    def answer(self, region: str, fragment: int, sequence: int) -> Answer:
        """Code x against a mirror of what the region has: what coding loses stays in the next change."""
        x, key = self.x[fragment], (region, fragment)
        if key not in self.mirrors:
            self.mirrors[key] = x.clone()
            return Answer(fragment, sequence, x.clone())
        payload = encode(x - self.mirrors[key])
        self.mirrors[key] += decode(payload, x.numel())
        return Answer(fragment, sequence, payload)


# ------------------------------------------------------------------------------------------------- 5. region server


@dataclass
class Fragment:
    """What a region keeps of one fragment, all vectors fp32."""

    x: Tensor  # weights
    base: Tensor  # weights as they were when the last update left, or was merged: the next one carries base − x
    mirror: Tensor  # the global weights as this region has received them
    momentum: Tensor
    residual: Tensor  # what the codec could not express on the way up so far
    pending: int = 0  # workers' updates that are in x and in no update of the region
    sequence: int = 0  # of the last update
    in_flight: bool = False
    contains: tuple[int, ...] = ()  # leases whose training is in x, and which the next update says it contains


class RegionServer:
    """Applies each worker's delta at once and answers with its own weights; sends its progress up after K deltas.

    momentum m = k·m + (1−k)·Δ ;  x −= (Δ + c·m) / workers, but for dead ones.  It stands where no link is slow.
    """

    def __init__(self, workers: tuple[str, ...], fragments: int, every: int = 2, decay: float = 0.9,
                 gain: float = 0.5, alpha: float = 0.5) -> None:  # fmt: skip
        self.number, self.every, self.gain, self.sharing = fragments, every, gain, set(workers)
        f32 = torch.tensor  # a Python number would be applied in double precision
        self.keep, self.add, self.alpha, self.rest = f32(decay), f32(1 - decay), f32(alpha), f32(1 - alpha)
        self.fragments: dict[int, Fragment] = {}
        self.waiting: list[str] = []  # workers that joined before the weights were here
        self.held: dict[str, dict[int, Lease]] = {worker: {} for worker in workers}  # not trained yet
        self.contained: dict[int, set[int]] = defaultdict(set)  # held lease → fragments that contain its training
        self.spent: set[str] = set()  # workers for which there was no data when they asked last

    def handle(self, sender: str, message: Any) -> Sends:
        sends: Sends = []
        match message:
            case ("join",):
                self.waiting.append(sender)
            case Update(fragment, sequence, delta, leases):
                self.apply(self.fragments[fragment], delta)
                self.fragments[fragment].contains += leases
                for number in leases:
                    self.contained[number].add(fragment)
                    if len(self.contained[number]) == self.number:  # it is trained
                        del self.held[sender][number]
                sends.append((sender, Answer(fragment, sequence, self.fragments[fragment].x.clone())))
            case Answer():
                self.merge(message)
            case ("lease", _):
                sends.append((GLOBAL, message))
            case Lease(number, worker) if worker in self.held:
                self.spent.discard(worker)
                self.held[worker][number] = message
                sends.append((worker, message))
            case Lease(number):  # its worker died meanwhile
                sends.append((GLOBAL, ("release", (number,))))
            case ("finished", worker):
                self.spent.add(worker)
                sends.append((worker, message))
            case ("leave",):
                sends.append((GLOBAL, ("release", tuple(self.held.pop(sender)))))
                self.sharing &= self.held.keys() | self.spent
        if len(self.fragments) == self.number:
            first = [Answer(i, 0, f.x.clone()) for i, f in sorted(self.fragments.items())]
            sends += [(worker, answer) for worker in self.waiting for answer in first]
            self.waiting.clear()
        return sends + self.progress()

    def apply(self, f: Fragment, delta: Tensor) -> None:
        f.momentum.copy_(self.keep * f.momentum + self.add * delta)
        c, w = torch.tensor([self.gain, 1.0]) / len(self.sharing)
        f.x -= c * f.momentum + w * delta
        f.pending += 1

    def progress(self) -> Sends:
        """One update per fragment with K deltas, or with any where no data is left: its answer sets the next base."""
        sends: Sends = []
        at_rest = not self.held or (self.spent and not any(self.held.values()))
        for number, f in sorted(self.fragments.items()):
            if f.in_flight or f.pending < (1 if at_rest else self.every):
                continue
            v = f.base - f.x + f.residual
            f.base.copy_(f.x)
            payload = encode(v)
            f.residual = v - decode(payload, v.numel())
            f.pending, f.in_flight, f.sequence, contains, f.contains = 0, True, f.sequence + 1, f.contains, ()
            sends.append((GLOBAL, Update(number, f.sequence, payload, contains)))
        return sends

    def merge(self, answer: Answer) -> None:
        """Move towards the global weights by α; what workers committed while the update travelled stays: it is
        base − x, and goes with the next update. Dropping it would lose training that the ledger has counted."""
        if answer.sequence == 0:
            x, zeros = answer.weights.clone(), torch.zeros_like(answer.weights)
            self.fragments[answer.fragment] = Fragment(x, x.clone(), x.clone(), zeros, zeros.clone())
            return
        f = self.fragments[answer.fragment]
        f.mirror += decode(answer.weights, f.x.numel())
        pending = f.base - f.x
        f.base.copy_(self.rest * f.base + self.alpha * f.mirror)
        f.x.copy_(f.base - pending)
        f.in_flight = False


# ------------------------------------------------------------------------------------------------- 6. worker


class Worker:
    """Trains lease after lease. Fragment i's delta leaves after step (i + 1) · H / fragments of each lease; its
    answer is adopted `overlap` steps later: θ = θ̃ + (θ − θ when sent), so the training done meanwhile stays."""

    def __init__(self, name: str, region: str, model: Model, text: Text, batch: int, overlap: int) -> None:
        self.name, self.region, self.model, self.text, self.size = name, region, model, text, batch
        self.overlap, self.dies_at_step = overlap, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.fragments = list(model.matrices)
        self.anchors: dict[int, Tensor] = {}  # the weights last adopted
        self.flights: dict[int, tuple[Tensor, int]] = {}  # fragment → weights when it left, step of adoption
        self.unsent: dict[int, set[int]] = {}  # trained lease → fragments that no delta has left of since
        self.step, self.sequences = 0, [0] * len(self.fragments)
        self.came: dict[Any, Any] = {}  # what was received and not taken yet

    def run(self, receive: Callable[[], Any], send: Callable[[Any], None]) -> None:
        self.receive, self.send = receive, send
        send(("join",))
        for i, matrix in enumerate(self.fragments):
            self.anchors[i] = self.wait((i, 0)).weights
            write(matrix, self.anchors[i])
        send(("lease", self.name))
        while isinstance(lease := self.wait("lease"), Lease):
            self.train(lease)
            send(("lease", self.name))
        self.adopt(everything=True)
        for fragment in sorted({i for fragments in self.unsent.values() for i in fragments}):
            self.push(fragment)
        self.adopt(everything=True)
        send(("leave",))

    def wait(self, key: Any) -> Any:
        while key not in self.came:
            message = self.receive()
            self.came[(message.fragment, message.sequence) if isinstance(message, Answer) else "lease"] = message
        return self.came.pop(key)

    def train(self, lease: Lease) -> None:
        numbers = range(lease.start, lease.start + lease.samples)
        steps = lease.samples // self.size
        due = {-(-steps * (i + 1) // len(self.fragments)): i for i in range(len(self.fragments))}
        for step in range(1, steps + 1):
            tokens, targets = self.text.batch(numbers[(step - 1) * self.size : step * self.size])
            loss = cross_entropy(self.model(tokens), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step == self.dies_at_step:
                raise ConnectionError("its machine is lost")
            self.adopt()
            if step == steps:
                self.unsent[lease.number] = set(range(len(self.fragments)))
            if step in due:
                self.push(due[step])

    def push(self, fragment: int) -> None:
        now = values(self.fragments[fragment])
        contains = tuple(lease for lease, fragments in self.unsent.items() if fragment in fragments)
        for fragments in self.unsent.values():
            fragments.discard(fragment)
        self.sequences[fragment] += 1
        self.send(Update(fragment, self.sequences[fragment], self.anchors[fragment] - now, contains))
        self.flights[fragment] = now, self.step + self.overlap

    def adopt(self, everything: bool = False) -> None:
        for fragment, (sent, due_step) in list(self.flights.items()):
            if everything or due_step <= self.step:
                theirs, matrix = self.wait((fragment, self.sequences[fragment])).weights, self.fragments[fragment]
                write(matrix, theirs + (values(matrix) - sent))
                self.anchors[fragment] = theirs
                del self.flights[fragment]


# ------------------------------------------------------------------------------------------------- 7. threads, links


class Run:
    """Threads for servers and workers, and one for each direction of a slow link, which holds a message back for as
    long as the wire would. journal: what servers handled and sent, in an order in which it can be handled again."""

    batch, local_steps, overlap = 32, 12, 2
    slow = 0.05, 1e6  # seconds, bytes a second between regions; within a region messages take no time

    def __init__(self, regions: dict[str, tuple[str, ...]], samples: int = 49152, dies_at_step: int = 0) -> None:
        self.text, self.samples = Text(Path(__file__)), samples
        self.start = [values(matrix) for matrix in Model().matrices]
        self.servers: dict[str, GlobalServer | RegionServer] = {
            GLOBAL: GlobalServer(
                self.start, len(regions), Ledger(samples, self.batch * self.local_steps, len(self.start))
            ),
            **{name: RegionServer(workers, len(self.start)) for name, workers in regions.items()},
        }
        homes = [(name, region) for region, names in regions.items() for name in names]
        self.workers = [Worker(name, region, Model(), self.text, self.batch, self.overlap) for name, region in homes]
        self.workers[-1].dies_at_step = dies_at_step
        self.inboxes: defaultdict[str, queue.Queue[Any]] = defaultdict(queue.Queue)
        self.links: dict[tuple[str, str], queue.Queue[Any]] = {}
        self.journal: list[tuple[str, str, Any, Sends]] = []
        self.bytes, self.done = 0, threading.Event()

    @property
    def ledger(self) -> Ledger:
        return self.servers[GLOBAL].ledger

    def train(self) -> None:
        """Returns when the ledger has counted every sample."""
        for region in self.servers.keys() - {GLOBAL}:
            self.send(region, GLOBAL, ("join",))
        for call, each in [(self.serve, name) for name in self.servers] + [(self.live, w) for w in self.workers]:
            threading.Thread(target=call, args=(each,), daemon=True).start()
        if not self.done.wait(timeout=600):
            raise TimeoutError(f"{self.ledger.committed} of {self.samples} samples after 600 s")

    def serve(self, name: str) -> None:
        while True:
            sender, message = self.inboxes[name].get()
            sends = self.servers[name].handle(sender, message)
            self.journal.append((name, sender, message, sends))  # before what it sends can be handled elsewhere
            for receiver, each in sends:
                self.send(name, receiver, each)
            if self.ledger.committed == self.samples:
                self.done.set()

    def live(self, worker: Worker) -> None:
        inbox = self.inboxes[worker.name]
        try:
            worker.run(lambda: inbox.get(timeout=600)[1], lambda m: self.send(worker.name, worker.region, m))
        except ConnectionError:
            self.send(worker.name, worker.region, ("leave",))  # in the product its silence says so

    def send(self, sender: str, receiver: str, message: Any) -> None:
        if GLOBAL not in (sender, receiver):
            self.inboxes[receiver].put((sender, message))
            return
        if (sender, receiver) not in self.links:
            self.links[sender, receiver] = queue.Queue()
            threading.Thread(target=self.carry, args=(sender, receiver), daemon=True).start()
        self.links[sender, receiver].put(message)

    def carry(self, sender: str, receiver: str) -> None:
        while True:
            message = self.links[sender, receiver].get()
            payload = getattr(message, "delta", getattr(message, "weights", b""))
            size = len(payload) if isinstance(payload, bytes) else payload.nbytes
            self.bytes += size
            time.sleep(self.slow[0] + size / self.slow[1])
            self.inboxes[receiver].put((sender, message))

    def loss(self, samples: int = 1024) -> float:
        """Mean of the global weights over samples that are not the run's, nats a character."""
        model = Model()
        for matrix, x in zip(model.matrices, self.servers[GLOBAL].x, strict=True):
            write(matrix, x)
        tokens, targets = self.text.batch(range(self.samples, self.samples + samples))
        with torch.no_grad():
            return cross_entropy(model(tokens), targets).item()


def main() -> None:
    torch.set_num_threads(1)
    run = Run({"eu": ("eu-0", "eu-1"), "us": ("us-0", "us-1")}, dies_at_step=100)
    print(f"loss {run.loss():.3f}; us-1 will die at its step 100")
    run.train()
    updates = sum(isinstance(message, Update) for name, _, message, _ in run.journal if name == GLOBAL)
    steps, numel = sum(worker.step for worker in run.workers), sum(x.numel() for x in run.start)
    print(f"loss {run.loss():.3f}, {run.ledger.committed} of {run.samples} samples, each counted once")
    print(f"{steps} steps, {updates} updates between regions, {run.bytes / 1e6:.1f} MB up and down")
    print(f"a gradient a step of both regions would be {steps * 4 * numel / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
