"""Measured cost of a server's work: the one place. `python -m benchmarks.servers --rates` writes it anew."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerRates:
    """Measured rates of a server's work. of_parameter: ns of a parameter, by stage. of_byte: ns of a byte of a
    payload, by stage. recovery_s_per_gb: of its snapshot, until it listens. All of one thread; note: how they were
    measured."""

    hardware: str
    note: str
    of_parameter: dict[str, float]
    of_byte: dict[str, float]
    recovery_s_per_gb: float


# fmt: off
MEASURED = ServerRates(hardware='AMD EPYC, 2 cores, 24 GiB, no GPU',
            note='python -m benchmarks.servers',
            of_parameter={'decode_and_norm': 0.335,
                          'rule': 0.324,
                          'answer': 1.79,
                          'up_encode': 2.34,
                          'merge': 0.508,
                          'mirror': 9.9},
            of_byte={'frames_in': 0.432, 'journal_write': 0.269, 'journal_flush': 0.292, 'frames_out': 0.373},
            recovery_s_per_gb=1.76)
