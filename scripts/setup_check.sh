#!/usr/bin/env bash
# What `make check` and `make fuzz` need beyond scripts/setup.sh, as Debian packages: clang with its
# sanitizers, libFuzzer and an OpenMP that ThreadSanitizer can follow; valgrind. Installed when root,
# else the line to type is printed. Prints the name of the C++ compiler.
set -euo pipefail
install() {
  local line="apt-get install -y --no-install-recommends $*"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "check: packages are missing; as root, type:  $line" >&2
    exit 1
  fi
  echo "check: $line" >&2
  DEBIAN_FRONTEND=noninteractive
  export DEBIAN_FRONTEND
  apt-get update -qq >&2
  $line -qq >/dev/null
}
# Newest first; the plain name last, because it may be older than a numbered one.
find_clang() {
  for clang in clang++-{20,19,18,17,16,15,14} clang++; do
    command -v "$clang" && return
  done
}
command -v valgrind >/dev/null || install valgrind
[ -n "$(find_clang)" ] || install clang
clang=$(find_clang)
major=$("$clang" -dumpversion | cut -d. -f1)
runtime=$("$clang" -print-file-name=libclang_rt.tsan-x86_64.a)
[ -e "$runtime" ] || [ -n "$(find "$("$clang" -print-resource-dir)" -name 'libclang_rt.tsan*.a' 2>/dev/null)" ] ||
  install "libclang-rt-$major-dev"
[ -e "/usr/lib/llvm-$major/lib/libarcher.so" ] || install "libomp-$major-dev"
[ -e "/usr/lib/llvm-$major/bin/llvm-symbolizer" ] || install "llvm-$major"
echo "$clang"
