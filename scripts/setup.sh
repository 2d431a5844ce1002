#!/usr/bin/env bash
# Makes the machine ready: Debian packages that are missing (installed when root, else the one line to
# type is printed), a virtual environment in .venv with the pinned Python packages. Quick when done.
set -euo pipefail
cd "$(dirname "$0")/.."

# What the build needs: command or file to look for, and the package that brings it.
missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need g++ g++
need cmake cmake
need ninja ninja-build
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
[ -d /usr/include/eigen3 ] || [ -d /usr/local/include/eigen3 ] || missing+=(libeigen3-dev)
[ -f /usr/include/gtest/gtest.h ] || [ -f /usr/local/include/gtest/gtest.h ] || missing+=(libgtest-dev)

if [ ${#missing[@]} -gt 0 ]; then
  line="apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: $line"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    $line -qq >/dev/null
  else
    echo "setup: packages are missing; as root, type:" >&2
    echo "  $line" >&2
    exit 1
  fi
fi

cmake_version=$(cmake --version | sed -n '1s/[^0-9]*//p')
if [ "$(printf '3.24\n%s\n' "$cmake_version" | sort -V | head -1)" != 3.24 ]; then
  echo "setup: cmake $cmake_version is older than 3.24; type: pip install 'cmake>=3.24'" >&2
  exit 1
fi

stamp=.venv/requirements.stamp
if ! cmp -s requirements-dev.txt "$stamp"; then
  [ -x .venv/bin/python ] || python3 -m venv .venv
  echo "setup: installing Python packages into .venv (about a minute)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
  # The source package is used in place: edits to python/ need no reinstall.
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$PWD/python" > "$site/thresher-source.pth"
  cp requirements-dev.txt "$stamp"
fi
