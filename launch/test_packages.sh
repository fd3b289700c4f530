#!/usr/bin/env bash
# Debian packages with the programs that tests and benchmarks start, beside Python's: `make test` calls this first. As
# root it installs what is missing; anybody else is told what to install.
set -euo pipefail

missing=()
# usage: needs "PACKAGE …" PROGRAM…: the packages are missing unless one of the programs is there
needs() {
  local packages=$1 program
  shift
  for program in "$@"; do
    if command -v "$program" >/dev/null; then return; fi
  done
  missing+=($packages)
}

needs iproute2 ip
needs iproute2 tc
needs openssh-client ssh
needs openssh-server sshd
needs pdsh pdsh
needs munge munged
needs slurmctld slurmctld
needs slurmd slurmd
needs slurm-client srun
needs prometheus promtool
needs chromium chromium chromium-browser google-chrome # the names that tests/support/chromium.py knows
needs "gcc libc6-dev" gcc                              # which only recommends the C library's headers
if ((${#missing[@]} == 0)); then exit; fi

missing=($(printf '%s\n' "${missing[@]}" | sort -u))
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "test: programs are missing; as root: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
