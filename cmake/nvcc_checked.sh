#!/bin/sh
# Compiler launcher of the CUDA sources: runs nvcc with ptxas's resource report switched on, shows
# what is not a report, and fails if a kernel spills registers or ptxas gives up on asynchronous
# wgmma (notes C7510 to C7519), since both cost far more than they look. A source that defines
# THRESHER_MAY_SPILL is only checked for the latter. The report is kept beside the object.
report=$(mktemp) || exit 1
trap 'rm -f "$report"' EXIT
"$@" -Xptxas -v >"$report" 2>&1
status=$?
grep -vE '^ptxas info|^ *[0-9]+ bytes stack frame|^ *Function properties' "$report" >&2
object=
may_spill=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  [ "$argument" = -DTHRESHER_MAY_SPILL ] && may_spill=1
  previous=$argument
done
[ $status -eq 0 ] || exit $status
[ -n "$object" ] && grep -E '^ptxas info|bytes stack frame' "$report" >"$object.ptxas"

bad=
if [ -z "$may_spill" ] && grep -qE '[1-9][0-9]* bytes spill' "$report"; then
  echo "$object: registers are spilled to memory" >&2
  grep -E -B 2 '[1-9][0-9]* bytes spill' "$report" >&2
  bad=1
fi
if grep -qE 'C751[0-9]' "$report"; then
  echo "$object: ptxas serialises wgmma" >&2
  grep -E -B 2 'C751[0-9]' "$report" >&2
  bad=1
fi
if [ -n "$bad" ]; then
  rm -f "$object"
  exit 1
fi
