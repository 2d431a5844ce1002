#!/usr/bin/env bash
# Installs the library from a build folder into a scratch prefix, then builds and runs examples/cpp as
# a separate project that knows nothing but find_package(Thresher).
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
prefix=$PWD/build/prefix
rm -rf "$prefix"
cmake --install "$build" --prefix "$prefix" >/dev/null
cmake -S examples/cpp -B build/example-cpp -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/example-cpp >/dev/null
build/example-cpp/train_layer
