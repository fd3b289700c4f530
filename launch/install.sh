#!/usr/bin/env bash
# Makes a virtual environment and installs GeoTrain into it, versions pinned by constraints.txt.
# usage: PYTHON=python3 PIP_ARGS="…" launch/install.sh .venv
#   PIP_ARGS: passed to every pip call, for example an index of CPU builds of torch.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "install: $python is older than 3.11; set PYTHON to a newer one" >&2
  exit 1
}
# Debian keeps ensurepip in a package of its own; virtualenv brings its own pip.
if ! "$python" -m venv "$venv" 2>/dev/null; then
  "$python" -m pip install --quiet --user --break-system-packages virtualenv || "$python" -m pip install --quiet virtualenv
  "$python" -m virtualenv --quiet "$venv"
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-})
# torch alone and first: another package's open range would bring the newest build instead.
"${pip[@]}" -c constraints.txt torch
"${pip[@]}" -c constraints.txt -e '.[dev]'
