"""A run's initial weights. Each parameter is drawn from the seed and its own name, so that the numbers depend neither
on the order nor on the parallel layout nor on the machine."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from geotrain.parameters.parameter_map import Parameter


def initial_tensor(parameter: Parameter, seed: int) -> torch.Tensor:
    """Draw a parameter's initial values: fp32, of its shape; normal with its init_std, ones, zeros, the logarithms
    of numbers between 0.01 and 16, as states have rates of decay, or what softplus makes time steps of, from 0.001
    to 0.1, as in Mamba-2.

    The numbers come from NumPy's Philox generator, whose stream is the same on every machine (torch's normal
    numbers depend on the processor's vector instructions).
    """
    if parameter.init in ("ones", "zeros"):
        return torch.full(parameter.shape, float(parameter.init == "ones"))
    key = hashlib.sha256(f"initial weights {seed} {parameter.name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8").copy()))
    if parameter.init == "log_uniform":
        return torch.from_numpy(np.log(generator.uniform(0.01, 16, parameter.shape)).astype(np.float32))
    if parameter.init == "time_steps":
        steps = np.exp(generator.uniform(np.log(0.001), np.log(0.1), parameter.shape))
        return torch.from_numpy(np.log(np.expm1(steps)).astype(np.float32))
    values = generator.standard_normal(parameter.shape, np.float32)
    return torch.from_numpy(values).mul_(parameter.init_std)
