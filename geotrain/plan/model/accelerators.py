"""Accelerators, as NVIDIA's data sheets have them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """flops, fp8_flops: dense bf16 and FP8, a second. memory_bytes, bandwidth: bytes, bytes a second. link: between
    two in one host, bytes a second each way. network: one 400 Gbit/s adapter for each device, likewise."""

    name: str
    flops: float
    memory_bytes: float
    bandwidth: float
    link: float
    network: float = 50e9
    fp8_flops: float = math.nan


# Sheets state rates with sparsity, twice the dense ones, and links of both ways together. NVLink of SXM modules: 600
# GB/s of A100, 900 of Hopper, 1,800 of Blackwell; cards: PCIe Gen4 x16 64 GB/s, Gen5 128 GB/s.
H100 = Accelerator("H100", 989.4e12, 80e9, 3.35e12, 450e9, fp8_flops=1978.9e12)  # H100 Tensor Core GPU, 2023
H200 = Accelerator("H200", 989.4e12, 141e9, 4.8e12, 450e9, fp8_flops=1978.9e12)  # H200 Tensor Core GPU, 2024
B200 = Accelerator("B200", 2250e12, 180e9, 7.7e12, 900e9, fp8_flops=4500e12)  # an eighth of a DGX B200, 2024
A100_80GB = Accelerator("A100-80GB", 312e12, 80e9, 2.039e12, 300e9)  # A100 Tensor Core GPU, 2021
# By SkyPilot's names.
ACCELERATORS = {
    "B200": B200,
    **dict.fromkeys(("H200", "H200-SXM"), H200),
    **dict.fromkeys(("H100", "H100-SXM", "H100-MEGA"), H100),
    "H100-PCIe": Accelerator("H100-PCIe", 756e12, 80e9, 2.0e12, 64e9, fp8_flops=1513e12),  # H100 PCIe, 2022
    **dict.fromkeys(("A100-80GB", "A100-80GB-SXM"), A100_80GB),
    "A100": Accelerator("A100", 312e12, 40e9, 1.555e12, 300e9),  # A100 Tensor Core GPU, 2020
    "L40S": Accelerator("L40S", 362e12, 48e9, 0.864e12, 32e9, fp8_flops=733e12),  # L40S, 2023
    "L40": Accelerator("L40", 181e12, 48e9, 0.864e12, 32e9, fp8_flops=362e12),  # L40, 2022
    "A10": Accelerator("A10", 125e12, 24e9, 0.6e12, 32e9),  # A10 Tensor Core GPU, 2021
    "A10G": Accelerator("A10G", 70e12, 24e9, 0.6e12, 32e9),  # A10G, of AWS's G5, 2021
    "L4": Accelerator("L4", 121e12, 24e9, 0.3e12, 32e9, fp8_flops=242e12),  # L4 Tensor Core GPU, 2023
}
