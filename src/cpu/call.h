// What the drivers share around a call: the fill of rows that nobody computes.
#pragma once

#include "core/shapes.h"
#include "cpu/args.h"
#include "cpu/threads.h"

namespace thresher::cpu {

inline DType accumulation_type(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Rows [begin, end) of every head become 0.
void zero_rows(const Threads& threads, const View& view, DType dtype, int64_t begin, int64_t end,
               int32_t heads, int32_t dim);
// One value a row (lse): -infinity, in the accumulation type of dtype.
void fill_lse(const View& view, DType dtype, int64_t begin, int64_t end, int32_t heads);

} // namespace thresher::cpu
