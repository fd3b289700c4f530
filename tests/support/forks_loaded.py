"""What the server of forks imports for its forks: the modules that `forks.preload` was given."""

import importlib
import os

from geotrain.launch.loading import loading
from tests.support.forks import PRELOADED

with loading():
    for module in os.environ[PRELOADED].split():
        importlib.import_module(module)
