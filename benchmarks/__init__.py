"""Measurements and studies of GeoTrain: each is run as `python -m benchmarks.NAME` from the repository's root.

The product imports nothing from here. Kept out of this file: imports, because some programs must set environment
variables before numpy or torch are loaded.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # of the repository
DATA = ROOT / "benchmarks" / "data"
