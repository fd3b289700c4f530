"""Names and addresses of hosts in configuration files.

They stand in command lines of ssh, env and DeepSpeed, where "-oProxyCommand=…" would be an option, and a space or a
quote the end of a word.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")  # never another machine, from wherever it is asked for
MOST_HOSTS = 65_536  # of one pattern
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}"
_ADDRESS = r"[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]{0,254}"  # or a name
_USER = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?"


def host_port(host: str, port: int) -> str:
    """Format an address as gRPC and URLs have it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether this host name or IP address reaches only the machine itself. Names are not looked up."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def expand_hosts(pattern: str) -> tuple[str, ...]:
    """List the hosts that a name, an address or a pattern means: gpu[01-03,7] → gpu01, gpu02, gpu03, gpu7, as Slurm
    and pdsh read it. Raises ValueError."""
    if "[" not in pattern or ":" in pattern:
        return (_host(pattern),)
    parts = re.split(r"\[([^\[\]]*)\]", pattern)  # text and the inside of brackets in turns
    choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
    if math.prod(map(len, choices)) > MOST_HOSTS:
        raise ValueError(f"must name at most {MOST_HOSTS} hosts")
    return tuple(_host("".join(each)) for each in itertools.product(*choices))


def _numbers(ranges: str) -> list[str]:
    """List the numbers of ranges as 01-03,7, each as wide as its range's first. Raises ValueError."""
    found = []
    for each in ranges.split(","):
        begin, _, end = each.partition("-")
        if re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", each) is None or int(end or begin) < int(begin):
            raise ValueError("must have numbers and ascending ranges in its brackets, as gpu[01-04,7]")
        # One too many is refused by the caller; a billion would not fit.
        numbers = range(int(begin), min(int(end or begin), int(begin) + MOST_HOSTS) + 1)
        found += [str(number).zfill(len(begin)) for number in numbers]
    return found


def _host(text: str) -> str:
    """Check a host's name or address; returns it, an IPv6 address without brackets. Raises ValueError."""
    if re.fullmatch(_NAME, text):
        return text
    if re.fullmatch(_ADDRESS, text):
        with suppress(ValueError):
            return str(ip_address(text[1:-1] if text[0] + text[-1] == "[]" else text))
    if re.fullmatch(rf"({_NAME}|\[.*\]):[0-9]+", text):
        raise ValueError(
            "must be a host's name or address alone: a server's port stands in `port`, ssh's in ~/.ssh/config"
        )
    raise ValueError(
        "must be a host's name or address: letters, digits and . _ - only, and no - at the front; in a list of "
        "`hosts` also a pattern as gpu[01-04,7]"
    )


def _ssh_host(text: str) -> str:
    """Check a host for ssh, which may begin with "user@". Raises ValueError."""
    user = re.match(_USER, text)
    begin = user.end() if user else 0
    return text[:begin] + _host(text[begin:])


def _text(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^{pattern}$"})


HostName = Annotated[str, AfterValidator(_host), _text(_ADDRESS)]
SshHost = Annotated[str, AfterValidator(_ssh_host), _text(_USER + _ADDRESS)]
HostPattern = Annotated[
    str,
    AfterValidator(lambda text: text if expand_hosts(text)[1:] else expand_hosts(text)[0]),
    _text(r"[A-Za-z0-9_:\[][A-Za-z0-9_.,:%\[\]-]*"),
]
