#!/usr/bin/env bash
# compute-sanitizer over a reduced set of the CUDA tests: small problems of every kernel. Usage:
#   scripts/sanitize_gpu.sh BUILD_FOLDER [TOOL ...]     (default: all four tools)
# racecheck does not know mbarriers and reports bulk copies of the Hopper kernels as hazards, so it
# runs on the portable kernels alone.
set -euo pipefail
build=$1
shift
[ $# -gt 0 ] || set -- memcheck initcheck synccheck racecheck
declare -A tests=(
  [index]='*OddDocuments:*EqualRows:*QueriesWithoutKeys'
  [select]='*ExactScores:*EqualRows:*QueriesWithoutKeys:*HopperLongestLists'
  [forward]='*OddDocumentsAndPadding:*Layouts:*QueriesWithoutKeys'
  [backward]='*OneBlock:*OneToken:*QueriesWithoutKeys'
)
for tool in "$@"; do
  for name in index select forward backward; do
    echo "== $tool $name"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/cuda/cuda_test_$name" \
      --gtest_brief=1 --gtest_filter="${tests[$name]}"
  done
done
