"""Set the environment that tests of benchmarks need; processes that they start inherit it."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before anything imports DeepSpeed
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of one test would only wait for a core that another has
