// Descriptors for bulk tensor copies of token tensors, viewed as [batch, row, head, dim].
#pragma once

#include <thresher/params.h>

#include <cuda.h>

namespace thresher::cuda::sm90 {

// Box: 64 columns (128 bytes, swizzled) x `heads` x `rows`.
CUtensorMap encode_map(const Tensor& tensor, int heads, int rows);

} // namespace thresher::cuda::sm90
