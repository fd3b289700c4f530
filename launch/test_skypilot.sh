#!/usr/bin/env bash
# SkyPilot, for the tests of `geotrain up`, in an environment of its own: its pins and ours do not go together.
# usage: launch/test_skypilot.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2
[[ -e $folder/installed ]] && exit
rm -rf "$folder"
"$python" -m venv "$folder" 2>/dev/null || "$python" -m virtualenv --quiet "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check skypilot==0.14.1
touch "$folder/installed"
