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
MEASURED = ServerRates(hardware='Intel(R) Xeon(R) Processor, 2 cores, 24 GiB, no GPU',
            note='python -m benchmarks.servers --rates',
            of_parameter={'decode_and_norm': 1.02,
                          'rule': 1.84,
                          'answer': 1.74,
                          'up_encode': 2.31,
                          'merge': 1.75,
                          'mirror': 4.99},
            of_byte={'frames_in': 0.421,
                     'journal_write': 0.373,
                     'journal_flush': 0.506,
                     'frames_out': 0.738,
                     'between': 0.607,
                     'tls': 0.605},
            recovery_s_per_gb=1.32)
