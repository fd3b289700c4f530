#!/usr/bin/env bash
# Makes a virtual environment and installs GeoTrain into it, versions pinned by constraints.txt: by uv where it is
# there, else by pip.
# usage: PYTHON=python3 PIP_ARGS="…" SYSTEM_SITE_PACKAGES=1 TORCH_VERSION=2.11.0 UV=uv launch/install.sh .venv
#   UV: the uv to use; empty: pip.
#   PIP_ARGS: passed to every call of pip or `uv pip`, for example an index of CPU builds of torch. Without it, a driver that does not
#     bear the CUDA of PyPI's torch ends the installation before it begins.
#   SYSTEM_SITE_PACKAGES: if not empty, the environment sees what $PYTHON has installed: a container's torch with
#     Transformer Engine and apex. That torch is kept.
#   TORCH_VERSION: of torch, from 2.11 on, in place of what constraints.txt pins; its own Triton comes with it.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "install: $python is none of 3.11 to 3.13, which Megatron-core has wheels for; set PYTHON to one of these" >&2
  exit 1
}
options=() pins=constraints.txt kept=
if [[ ${SYSTEM_SITE_PACKAGES:-} ]]; then
  options=(--system-site-packages)
  kept=$("$python" -c 'from importlib import metadata; print("torch==" + metadata.version("torch"))' 2>/dev/null || true)
fi
if [[ ! $kept && ! ${PIP_ARGS:-} && ${DS_ACCELERATOR:-} != cpu ]]; then
  "$python" launch/cuda_driver.py
fi
uv=${UV-$(command -v uv || true)}
if [[ $uv ]]; then
  "$uv" venv --quiet --seed --allow-existing --python "$python" "${options[@]}" "$venv"
# Debian keeps ensurepip in a package of its own; virtualenv brings its own pip.
elif ! "$python" -m venv "${options[@]}" "$venv" 2>/dev/null; then
  "$python" -m pip install --quiet --user --break-system-packages virtualenv || "$python" -m pip install --quiet virtualenv
  "$python" -m virtualenv --quiet "${options[@]}" "$venv"
fi
kept=${kept:-${TORCH_VERSION:+torch==$TORCH_VERSION}}
if [[ $kept ]]; then
  # What is compiled against this torch works with no other. An image may also pin, for the whole system, other
  # versions than ours of what is installed into the environment.
  pins=$venv/constraints.txt
  { grep -vE '^(torch|triton)==' constraints.txt; echo "$kept"; } >"$pins"
  unset PIP_CONSTRAINT
fi
if [[ $uv ]]; then
  # uv reads none of pip's settings, and looks no further than the first index that knows a package.
  [[ ! ${PIP_INDEX_URL:-} ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX-$PIP_INDEX_URL}
  [[ ! ${PIP_EXTRA_INDEX_URL:-} ]] || export UV_INDEX=${UV_INDEX-$PIP_EXTRA_INDEX_URL}
  [[ ! ${PIP_FIND_LINKS:-} ]] || export UV_FIND_LINKS=${UV_FIND_LINKS-${PIP_FIND_LINKS// /,}}
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY-unsafe-best-match}
  pip=("$uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" ${PIP_ARGS:-})
else
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-})
fi
# torch alone and first: another package's open range would bring the newest build instead.
"${pip[@]}" -c "$pins" torch
"${pip[@]}" -c "$pins" -e '.[dev]'
