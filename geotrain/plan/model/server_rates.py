"""Measured cost of a server's work: the one place. `python -m benchmarks.servers --rates` writes it anew."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ServerRates:
    """Measured rates of a server's work. of_parameter: ns of a parameter, by stage. of_byte: ns of a byte of a
    payload, by stage; `between` is what an update takes from end to end beyond its stages (fresh memory, gRPC, waits
    of one thread for another), `tls` what encryption adds to that, both for a byte in or out. recovery_s_per_gb: of
    its snapshot, until it listens. note: how they were measured."""

    hardware: str
    note: str
    of_parameter: dict[str, float]
    of_byte: dict[str, float]
    recovery_s_per_gb: float

    def over(self, encrypted: bool) -> ServerRates:
        """Return the rates over links that are encrypted, or not."""
        between = self.of_byte["between"] + (self.of_byte["tls"] if encrypted else 0.0)
        return replace(self, of_byte={**self.of_byte, "between": between})


# fmt: off
MEASURED = ServerRates(hardware='AMD EPYC, 2 cores, 24 GiB, no GPU',
            note='python -m benchmarks.servers --rates',
            of_parameter={'decode_and_norm': 0.62,
                          'rule': 0.472,
                          'answer': 0.313,
                          'up_encode': 1.26,
                          'merge': 0.751,
                          'mirror': 4.95},
            of_byte={'frames_in': 0.128,
                     'journal_write': 0.308,
                     'journal_flush': 0.367,
                     'frames_out': 0.107,
                     'between': 1.86,
                     'tls': 0.264},
            recovery_s_per_gb=0.47)
