#include "cpu/call.h"

#include <cstring>
#include <limits>

namespace thresher::cpu {
namespace {

int64_t offset(const View& v, int64_t token, int64_t head) {
  return token / v.per_row * v.batch + token % v.per_row * v.token + head * v.head;
}

} // namespace

void zero_rows(const Threads& threads, const View& view, DType dtype, int64_t begin, int64_t end,
               int32_t heads, int32_t dim) {
  if (!view.data)
    return;
  const size_t size = element_size(dtype);
  threads.for_ranges(end - begin, 1024, [&](int64_t from, int64_t to) {
    for (int64_t row = begin + from; row < begin + to; ++row)
      for (int32_t h = 0; h < heads; ++h)
        std::memset(static_cast<char*>(view.data) +
                        offset(view, row, h) * static_cast<int64_t>(size),
                    0, size * static_cast<size_t>(dim));
  });
}

void fill_lse(const View& view, DType dtype, int64_t begin, int64_t end, int32_t heads) {
  if (!view.data)
    return;
  for (int64_t row = begin; row < end; ++row)
    for (int32_t h = 0; h < heads; ++h) {
      if (accumulation_type(dtype) == DType::kFloat64)
        static_cast<double*>(view.data)[offset(view, row, h)] =
            -std::numeric_limits<double>::infinity();
      else
        static_cast<float*>(view.data)[offset(view, row, h)] =
            -std::numeric_limits<float>::infinity();
    }
}

} // namespace thresher::cpu
