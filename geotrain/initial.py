"""A run's first weights, each drawn from the seed and its own name: independent of order, layout and machine."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from geotrain.canonical import Parameter


def initial_tensor(parameter: Parameter, seed: int) -> torch.Tensor:
    """fp32, of the parameter's shape. Normal with its init_std, or ones.

    The numbers come from NumPy's Philox generator, whose stream is the same on every machine (torch's normal
    numbers depend on the processor's vector instructions).
    """
    if parameter.init == "ones":
        return torch.ones(parameter.shape)
    key = hashlib.sha256(f"initial weights {seed} {parameter.name}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8").copy()))
    values = generator.standard_normal(parameter.shape, np.float32)
    return torch.from_numpy(values).mul_(parameter.init_std)
