"""Fixtures that run servers on real sockets in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geotrain.config import FragmentConfig
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from tests.support import net_worlds
from tests.support.net_worlds import Cluster, clusters, outer, whole


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, and ends them after the test."""
    with clusters(tmp_path) as maker:
        yield maker


@pytest.fixture
def large(make: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster with one parameter of 6 M elements: updates of 24 MB, in 24 data frames. Nothing is sent up."""
    parameters = [Parameter("big", (6000, 1000), None, "ones")]
    monkeypatch.setattr(net_worlds, "tiny_layout", lambda config: ParameterMap(parameters))
    return make(outer(fragments=FragmentConfig(), updates_per_send=50), {"eu": {"a": whole}})
