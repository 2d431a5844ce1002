#!/usr/bin/env bash
# Fault finding on the CPU part. Usage: scripts/check.sh BUILD_FOLDER [asan|tsan|valgrind ...]
#   asan      the C++ tests, and a few thousand inputs of each fuzz driver, under AddressSanitizer and
#             UndefinedBehaviorSanitizer (gcc)
#   tsan      the C++ tests under ThreadSanitizer (clang and its OpenMP), after a race that was put in on
#             purpose has been reported
#   valgrind  a step of every operation in the ordinary build
# Prints what it runs, fails at the first report.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
[ $# -gt 0 ] || set -- asan tsan valgrind
clang=$(scripts/setup_check.sh)
jobs=${JOBS:-$(nproc)}
export OMP_WAIT_POLICY=passive # threads that spin are slow beside others

configure() { # preset, options
  cmake --preset "$@" >"build/$1.log" 2>&1 || { cat "build/$1.log" && exit 1; }
}
asan() {
  configure asan
  cmake --build build/asan -j "$jobs"
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_init_order=1
  export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
  ctest --test-dir build/asan --output-on-failure -j "$jobs"
}
tsan() {
  configure tsan -DCMAKE_CXX_COMPILER="$clang"
  cmake --build build/tsan -j "$jobs" --target thresher_tests check_race
  local major archer
  major=$("$clang" -dumpversion | cut -d. -f1)
  archer=/usr/lib/llvm-$major/lib/libarcher.so
  # archer tells ThreadSanitizer where OpenMP's threads meet. libomp itself is not instrumented: what
  # happens inside it is not looked at, what our code does is.
  export OMP_TOOL_LIBRARIES=$archer ARCHER_OPTIONS=verbose=1 OMP_NUM_THREADS=4
  export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66
  export TSAN_SYMBOLIZER_PATH=/usr/lib/llvm-$major/bin/llvm-symbolizer
  local status=0
  build/tsan/tests/check/check_race >build/race.log 2>&1 || status=$?
  if ! grep -q "Archer detected OpenMP application with TSan" build/race.log ||
    ! grep -q "race.cpp" build/race.log || [ $status != 66 ]; then
    cat build/race.log
    echo "check: the race in tests/check/race.cpp was not reported; silence would mean nothing" >&2
    exit 1
  fi
  echo "check: the race in tests/check/race.cpp is reported, as it must be"
  ARCHER_OPTIONS='' build/tsan/tests/cpp/thresher_tests --gtest_brief=1
}
valgrind_step() {
  cmake --build "$build" -j "$jobs" --target check_step
  OMP_NUM_THREADS=2 valgrind -q --error-exitcode=1 --leak-check=full \
    --show-leak-kinds=definite --errors-for-leak-kinds=definite "$build/tests/check/check_step"
}

mkdir -p build
for part in "$@"; do
  echo "== $part"
  case $part in
    asan | tsan) $part ;;
    valgrind) valgrind_step ;;
    *) echo "check: unknown part $part" >&2 && exit 1 ;;
  esac
done
