#!/usr/bin/env bash
# llama.cpp's converter of Hugging Face checkpoints, which no package installs: the source distribution of
# llama-cpp-python carries it. `make test` fetches it before the tests.
# usage: launch/test_converter.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2
[[ -e $folder ]] && exit
mkdir -p "$(dirname "$folder")"
part=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$part"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
  --dest "$part" llama-cpp-python==0.3.36
mkdir "$part/out"
tar -xzf "$part"/llama_cpp_python-*.tar.gz -C "$part/out" --strip-components 3 --wildcards \
  '*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
mv -T "$part/out" "$folder"
