"""On what all processes of a run must agree."""

from __future__ import annotations

from geotrain.config import RunConfig
from geotrain.config.agreement import config_digest
from geotrain.outer.messages import Identity
from geotrain.parameters.parameter_map import ParameterMap


def identity_of(run: RunConfig, parameter_map: ParameterMap, data: str = "") -> Identity:
    """Build the identity on which all processes of this run must agree. data: sha256 of the training data that is
    here; a server, which has none, knows what the run file says."""
    model = f"{run.model.config.get('model_type', 'a model')} of {parameter_map.numel:,} parameters"
    return Identity(run.name, config_digest(run), parameter_map.digest, model, data or run.data.sha256 or "")
