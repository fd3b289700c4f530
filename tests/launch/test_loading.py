"""Loaded modules are kept from the garbage collector, and nothing else."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from geotrain.launch.loading import loading

# A process that loads, makes a circle of objects, and says what the collector does with both.
LOADS = """
import gc, json, weakref
from geotrain.launch.loading import loading
class Node: pass
with loading():
    inside = gc.isenabled()
    loaded = Node()
    loaded.self = loaded
kept = gc.get_freeze_count()
node = Node()
node.self = node
gone = weakref.ref(node)
del node
gc.collect()
known = any(o is loaded for o in gc.get_objects())
print(json.dumps([inside, gc.isenabled(), kept > 1000, gone() is None, known]))
"""


def test_what_is_loaded_is_not_looked_at_and_what_comes_later_is_collected() -> None:
    said = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == [False, True, True, True, False]


def test_a_failure_while_loading_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError("the test says so")
    assert gc.isenabled()


def test_a_module_runs_as_it_would_by_itself(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text("import gc, sys\nprint(__name__, gc.isenabled(), sys.argv[1:])\nsys.exit(7)\n")
    command = [sys.executable, "-m", "geotrain.launch.loading", "told", "--a", "b"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (said.stdout, said.returncode) == ("__main__ False ['--a', 'b']\n", 7), said.stderr
