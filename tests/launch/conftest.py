import pytest

from geotrain.launch.check import free_ports


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody used a moment ago."""
    return free_ports(1)[0]
