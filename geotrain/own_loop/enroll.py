"""Joins a run that no file describes, by the address and the token that `geotrain serve` prints."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.config import ConfigError
from geotrain.net.transport.certs import CertificateError
from geotrain.net.transport.enrollment import TOKEN, EnrollmentClient, Token, Welcomed
from geotrain.outer.messages import Refused
from geotrain.own_loop.masters import module_of, shape_of
from geotrain.own_loop.rank import TorchRank
from geotrain.own_loop.save import fingerprint, named_tensors, whole
from geotrain.parameters.parameter_map import ParameterMap, map_of_any

SENT_BYTES = 64 << 20  # so much is sent between two collectives, which have a deadline
OTHERS_S = 3600.0  # how long others are waited for, who are to join or send the first weights


def is_address(run: object) -> bool:
    return isinstance(run, str) and re.fullmatch(r"[^/\s]+:[0-9]{1,5}", run) is not None


def enroll(
    address: str,
    region: str,
    model: nn.Module,
    rank: TorchRank,
    every: int,
    samples_per_step: int,
    token: str | None,
    folder: str | Path | None,
    connect_s: float,
) -> tuple[Welcomed, ParameterMap]:
    """Enroll with the server at host:port, as the worker of a region. All ranks call it, which contains collectives.

    The first worker of the run sends the values of its parameters, which begin the run. folder: for this worker's
    events and state; None: runs/ and the run's name, in the working directory.
    Raises CertificateError: the token is no good, or another server's; Refused: the server does not take this
    worker; ConfigError: a parameter is not finite; ConnectionError.
    """
    given = os.environ.get(TOKEN) if token is None else token
    if given is None:
        raise ConfigError(f"OuterLoop: {address} needs the token that `geotrain serve` prints: token=, or {TOKEN}")
    known = Token.read(given)
    found = dict(named_tensors(module_of(model)))
    trained = {n: found[n] for n in sorted(found) if found[n].requires_grad and 0 not in shape_of(found[n])}
    if not trained:
        raise ConfigError("the model has no parameter that requires a gradient")
    shapes = {name: shape_of(tensor) for name, tensor in trained.items()}
    fixed = {name: fingerprint(tensor) for name, tensor in found.items() if name not in trained}
    said = {"every": every, "samples_per_step": samples_per_step, "shapes": shapes, "fixed": fixed}
    begun_s = time.monotonic()
    while True:
        reply = _attempt(address, known, region, said, trained, rank)
        if isinstance(reply, Welcomed):
            run = reply.run.model_copy(update={"folder": str(Path(folder or f"runs/{reply.run.name}").absolute())})
            return replace(reply, run=run), map_of_any(run, shapes, fixed)
        why, patience_s = reply
        if patience_s is None:
            raise Refused(why)
        if time.monotonic() - begun_s > max(patience_s, connect_s):
            raise ConnectionError(
                f"{region}: the server at {address} let nobody in within {max(patience_s, connect_s):g} s ({why}); "
                "check that `geotrain serve` runs there, and that no firewall is before its port"
            )
        time.sleep(0.5)


def _attempt(
    address: str, token: Token, region: str, said: Mapping[str, Any], trained: Mapping[str, Tensor], rank: TorchRank
) -> Welcomed | tuple[str, float | None]:
    """Ask once; returns, on all ranks, the reply or (why not, seconds for which to ask again, None: not at all)."""
    clients: list[EnrollmentClient] = []  # rank 0's

    def asked(call: Callable[[EnrollmentClient], Any]) -> Any:
        """Call on rank 0; what came of it, for all ranks."""
        reply: Any = None
        if rank.rank == 0:
            try:
                if not clients:
                    clients.append(EnrollmentClient(address, token))
                reply = call(clients[0])
            except CertificateError as error:
                reply = str(error), None
            except Refused as refused:
                reply = refused.reason, OTHERS_S if refused.retry_s else None
            except OSError as error:
                reply = str(error), 0.0
        return rank.gather(reply)[0]

    try:
        reply = asked(lambda client: client.ask(region, said))
        if reply is not None:
            return reply
        for name, tensor in trained.items():
            values = whole(tensor).float()
            if not torch.isfinite(values).all():
                raise ConfigError(f"parameter {name} holds infinities or NaN; a run cannot begin with it")
            flat: Any = values.view(-1).view(torch.uint8).numpy()
            content = memoryview(flat)
            for start in range(0, len(content), SENT_BYTES):
                part = content[start : start + SENT_BYTES]
                reply = asked(partial(EnrollmentClient.send, values=part)) if reply is None else reply
        return asked(EnrollmentClient.finish) if reply is None else reply
    finally:
        for client in clients:
            client.close()
