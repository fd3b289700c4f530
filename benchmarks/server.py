"""Speed of a server's update: decoding a delta with its norm, the rule, and the answer's encoding.

    python -m benchmarks.server [--numel 33554432] [--codec bf16] [--rounds 15] [--record]

Delayed Nesterov with the global server's settings, on two threads. One repetition is one cycle of updates, of which
the last moves the momentum; three programs alternate: the product's kernels, the torch arithmetic that they replaced
(kept here), and a copy of as many bytes as the kernels must touch. Times are of single updates.
The last line printed is one JSON object:

speedup_over_torch        torch's time over the kernels', median over repetitions; _low and _high: where the median
                          lies at a confidence of 95 %
vs_memcpy                 the copy's time over the kernels'
ns_per_parameter, torch_ns_per_parameter
                          median of each stage
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import fsum, inf, sqrt
from statistics import median

import torch
from torch import Tensor

from benchmarks.common import command_line, ratio, report
from geotrain.config import CodecConfig, HalosConfig, codec_config, rule_config
from geotrain.layout import Layout, Parameter
from geotrain.outer.codec import Codec, make_codec
from geotrain.outer.downlink import to_bytes
from geotrain.outer.limits import norm
from geotrain.outer.messages import Join, PieceDelta, UpdatePart
from geotrain.outer.rules import Counts, global_rule
from geotrain.staging import from_bytes
from geotrain.vault import Apply, Decode, Forget, Freeze, Vault

STAGES = ("decode_and_norm", "rule", "answer")


class Kernels:
    """What a server's vault does with an update of one part."""

    def __init__(self, numel: int, codec: CodecConfig, payload: bytes) -> None:
        layout = Layout([Parameter("a", (numel,), None, "zeros")])
        self.rule, self.counts = global_rule(rule_config("halos"), ("eu",)), Counts()
        self.vault = Vault("global", layout, layout.pieces, self.rule, make_codec(codec), codec)
        self.vault.set_weights(0, torch.zeros(numel))
        whole = (layout.whole(0),)
        self.vault.hear(Join("r", "c", layout.digest, "m", "eu", "1", 0, 1, whole, whole))
        self.update = UpdatePart("eu", "1", 1, 0, (PieceDelta(0, 0, payload),))

    def decode_and_norm(self) -> float:
        self.vault.hear(self.update)
        decoded = self.vault.obey(Decode("eu", 1, (0,)))
        self.vault.obey(Forget("eu", updates=(1,)))
        return norm([each.squares for each in decoded])

    def apply(self) -> None:
        told, _ = self.rule.on_delta(self.counts, "eu", 1)
        self.vault.obey(Apply("eu", 0, self.counts.version, told))

    def answer(self) -> None:
        self.vault.obey(Freeze("eu", 1, 0, self.counts.version))
        self.vault.obey(Forget("eu", answers=(1,)))

    @property
    def x(self) -> Tensor:
        return self.vault.vectors[0].x


class Torch:
    """The same in torch, as servers did it before; the codecs were compiled then, too."""

    def __init__(self, numel: int, codec: CodecConfig, payload: bytes) -> None:
        self.settings, self.up, self.arrivals = HalosConfig(name="halos").global_, make_codec(codec), 0
        self.changes = codec.name not in ("fp32", "bf16")
        self.x, self.m, self.acc, self.mirror = (torch.zeros(numel) for _ in range(4))
        self.payload = payload

    def decode_and_norm(self) -> float:
        self.delta = torch.empty(len(self.x))
        self.delta.copy_(self.up.decode(from_bytes(self.payload), len(self.x)))
        return torch_norm(self.delta)

    def apply(self) -> None:
        beta, buffer, lr = self.settings.beta, self.settings.buffer, self.settings.lr_per_update
        self.arrivals += 1
        self.acc.add_(self.delta)
        if self.arrivals % buffer == 0:
            self.m.mul_(beta).add_(self.acc, alpha=1 / buffer)
            self.x.add_(self.m, alpha=-lr * buffer * beta).add_(self.delta, alpha=-lr)
            self.acc.zero_()
        else:
            self.x.add_(self.delta, alpha=-lr)

    def answer(self) -> object:
        if not self.changes:
            return to_bytes(self.up.encode(self.x).payload)
        payload = self.up.encode(self.x - self.mirror).payload
        self.up.decode_accumulate(payload, self.mirror)
        return to_bytes(payload)


def torch_norm(vector: Tensor) -> float:
    """The same bits at any number of threads: rows of 4096 elements are summed by one thread each, in fp64."""
    row, rows_a_step = 4096, 4096
    whole = vector.numel() // row * row
    rows = vector[:whole].view(-1, row)
    pieces = [rows[start : start + rows_a_step] for start in range(0, len(rows), rows_a_step)]
    pieces += [vector[whole:].view(1, -1)]
    sums = [s for piece in pieces for s in piece.square().sum(1, dtype=torch.float64).tolist()]
    return sqrt(fsum(sums)) if all(s < inf for s in sums) else inf


def cycle(server: Kernels | Torch, updates: int) -> list[float]:
    """Seconds of each stage, of one update on average."""
    spent = [0.0] * len(STAGES)
    for _ in range(updates):
        for i, stage in enumerate((server.decode_and_norm, server.apply, server.answer)):
            begin = time.perf_counter()
            stage()
            spent[i] += time.perf_counter() - begin
    return [seconds / updates for seconds in spent]


def measure(numel: int, codec: CodecConfig, rounds: int) -> dict[str, object]:
    coder: Codec = make_codec(codec)
    payload = to_bytes(coder.encode(1e-3 * torch.randn(numel)).payload)
    updates = HalosConfig(name="halos").global_.buffer
    servers: dict[str, Kernels | Torch] = {
        "own": Kernels(numel, codec, payload),
        "torch": Torch(numel, codec, payload),
    }
    # decoding writes fp32, the rule moves 20 bytes an element and with the momentum 28, the answer reads fp32
    touched = 2 * len(payload) + numel * (4 + 20 + 8 // updates + 4)
    source, target = (torch.ones(touched // 2, dtype=torch.uint8) for _ in range(2))
    stages: dict[str, list[list[float]]] = {name: [] for name in servers}
    copies = []
    for number in range(rounds + 1):
        spent = {name: cycle(server, updates) for name, server in servers.items()}
        copied = elapsed(lambda: target.copy_(source))
        if number:  # the first warms up
            copies.append(copied)
            for name in servers:
                stages[name].append(spent[name])
    assert servers["own"].decode_and_norm() / servers["torch"].decode_and_norm() - 1 < 1e-6
    torch.testing.assert_close(servers["own"].x, servers["torch"].x, rtol=1e-4, atol=1e-6)
    own, old = ([sum(times) for times in stages[name]] for name in ("own", "torch"))
    per_stage = {
        name: {stage: 1e9 * median(t[i] for t in times) / numel for i, stage in enumerate(STAGES)}
        for name, times in stages.items()
    }
    return {
        **ratio("speedup_over_torch", old, own),
        **ratio("vs_memcpy", copies, own),
        "ns_per_parameter": per_stage["own"],
        "torch_ns_per_parameter": per_stage["torch"],
    }


def elapsed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = command_line(__doc__, quick={"numel": 1 << 21, "rounds": 3})
    parser.add_argument("--numel", type=int, default=1 << 25)
    parser.add_argument("--codec", default="bf16", help="of both directions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.numel, codec_config(options.codec), options.rounds)
    for key, value in result.items():
        print(key, value)
    note = f"{options.codec}, {options.numel} elements"
    report("server", result, options, lambda metric: "ns" if "ns_per" in metric else "ratio", note)


if __name__ == "__main__":
    main()
