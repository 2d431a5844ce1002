#!/usr/bin/env bash
# Runs every driver of tests/fuzz for a time, with libFuzzer, AddressSanitizer and
# UndefinedBehaviorSanitizer. Usage: scripts/fuzz.sh SECONDS_PER_TARGET [TARGET ...]
# The corpus grows in build/corpus; an input that fails is left beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
[ $# -gt 0 ] || set -- describe indices
clang=$(scripts/setup_check.sh)
mkdir -p build
cmake --preset fuzz -DCMAKE_CXX_COMPILER="$clang" >build/fuzz.log 2>&1 || { cat build/fuzz.log && exit 1; }
cmake --build build/fuzz -j "${JOBS:-$(nproc)}" --target "${@/#/fuzz_}"
export OMP_NUM_THREADS=1 # an input is too small for more
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
for target in "$@"; do
  echo "== $target, $seconds s"
  mkdir -p "build/corpus/$target"
  build/fuzz/tests/fuzz/fuzz_"$target" -max_total_time="$seconds" -max_len=512 -len_control=0 \
    -print_final_stats=1 -verbosity=0 -artifact_prefix="build/corpus/$target-" "build/corpus/$target"
done
