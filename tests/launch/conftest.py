import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody used a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
