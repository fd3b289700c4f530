"""Accelerators, as NVIDIA's data sheets have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """flops: dense bf16, a second. link: between two in one host, bytes a second each way."""

    flops: float
    memory_bytes: float
    link: float


# Sheets state rates with sparsity, twice the dense ones, and links of both ways together. NVLink of SXM modules: 600
# GB/s of A100, 900 of Hopper, 1,800 of Blackwell; cards: PCIe Gen4 x16 64 GB/s, Gen5 128 GB/s.
# By SkyPilot's names.
ACCELERATORS = {
    "B200": Accelerator(2250e12, 180e9, 900e9),  # an eighth of a DGX B200, 2024
    **dict.fromkeys(("H200", "H200-SXM"), Accelerator(989.4e12, 141e9, 450e9)),  # H200 Tensor Core GPU, 2024
    **dict.fromkeys(("H100", "H100-SXM", "H100-MEGA"), Accelerator(989.4e12, 80e9, 450e9)),  # the same, 2023
    "H100-PCIe": Accelerator(756e12, 80e9, 64e9),  # H100 PCIe, 2022
    **dict.fromkeys(("A100-80GB", "A100-80GB-SXM"), Accelerator(312e12, 80e9, 300e9)),  # the same, 2021
    "A100": Accelerator(312e12, 40e9, 300e9),  # A100 Tensor Core GPU, 2020
    "L40S": Accelerator(362e12, 48e9, 32e9),  # L40S, 2023
    "L40": Accelerator(181e12, 48e9, 32e9),  # L40, 2022
    "A10": Accelerator(125e12, 24e9, 32e9),  # A10 Tensor Core GPU, 2021
    "A10G": Accelerator(70e12, 24e9, 32e9),  # A10G, of AWS's G5, 2021
    "L4": Accelerator(121e12, 24e9, 32e9),  # L4 Tensor Core GPU, 2023
}
