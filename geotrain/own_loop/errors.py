"""Shortens the errors of a user's loop that say all in their message: files, settings, servers, saved state."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from geotrain.checkpoint.folders import CheckpointError
from geotrain.common.files import OutputError
from geotrain.config import ConfigError
from geotrain.net.transport.certs import CertificateError
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.outer.messages import Refused

SAID = (ConfigError, CertificateError, CheckpointError, OutputError, Refused, Unreachable)
P = ParamSpec("P")
T = TypeVar("T")


def in_two_lines(function: Callable[P, T]) -> Callable[P, T]:
    """Let an error of these kinds that leaves the function, and that nobody catches, end the program with two lines:
    the one of the user's program, and the message. The exception itself is as it was."""

    @wraps(function)
    def called(*args: P.args, **named: P.kwargs) -> T:
        try:
            return function(*args, **named)
        except SAID as error:
            sys.excepthook = _hook(error, sys.excepthook)
            raise

    return called


def _hook(said: BaseException, otherwise: Callable[..., object]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not said:
            otherwise(kind, error, trace)
            return
        frames = traceback.extract_tb(trace)
        mine = [frame for frame in frames if frame.filename == getattr(sys.modules["__main__"], "__file__", "")]
        at = (mine or frames)[-1]
        print(f"{at.filename}, line {at.lineno}: {at.line}\n{kind.__name__}: {error}", file=sys.stderr)

    return hook
