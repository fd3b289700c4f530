#!/usr/bin/env bash
# For a machine with GPUs that reaches no package index, whose Python has torch, Triton, transformers and what comes
# with those: the other packages as wheels, for CPython 3.12 on x86-64 Linux.
# usage, in a checkout: bash launch/wheels.sh collect FOLDER [PYTHON]       where there is an index; PYTHON: any with pip
#                       bash launch/wheels.sh install FOLDER SITE [PYTHON]  there: into the folder SITE, for PYTHONPATH
set -euo pipefail
cd "$(dirname "$0")/.."
verb=$1 folder=$2

pinned() {
  grep -iE "^$(tr '_-' '..' <<<"$1")==" constraints.txt | grep -v "< '3.12'" | cut -d ' ' -f 1
}

collect() {
  local python=${1:-python3} name version work platforms=()
  # typing_extensions: pydantic asks for one that is newer than many machines have.
  local names="pydantic pydantic_core annotated-types typing-inspection typing_extensions cryptography cffi pycparser
    zstandard zlib-ng hjson msgpack megatron-core"
  for each in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${each}_x86_64")
  done
  mkdir -p "$folder"
  for name in $names; do
    version=$(pinned "$name") || { echo "wheels: constraints.txt does not pin $name" >&2; exit 1; }
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      "${platforms[@]}" -d "$folder" "$version"
  done
  # DeepSpeed is published as source only. Without its compiled operators its wheel is pure Python, for any version.
  if ! compgen -G "$folder/deepspeed-*.whl" >/dev/null; then
    work=$(mktemp -d)
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install -q setuptools wheel packaging ninja py-cpuinfo psutil pydantic hjson tqdm msgpack numpy
    DS_BUILD_OPS=0 "$work/venv/bin/pip" wheel -q --no-deps --no-build-isolation --no-binary=deepspeed -w "$folder" \
      "$(pinned deepspeed)"
    rm -r "$work"
  fi
}

install() {
  local site=$1 python=${2:-python3}
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$folder"/*.whl
  # A checkout has these three beside the package, an installation inside it.
  for each in kernels launch configs; do [[ -e geotrain/$each ]] || ln -s "../$each" "geotrain/$each"; done
  "$python" setup.py -q build_ext --inplace
  PYTHONPATH=$PWD:$site "$python" -c 'import deepspeed, megatron.core, geotrain.inner.build
from geotrain.kernels import cpu
assert cpu.library(), "the C kernels were not built"'
}

"$verb" "${@:3}"
