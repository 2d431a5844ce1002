#include "cuda/portable/select/score.cuh"

namespace thresher::cuda::portable {
template struct ScoreTiles<fp16, 64>;
template struct ScoreTiles<fp16, 96>;
template struct ScoreTiles<fp16, 128>;
template struct ScoreTiles<fp16, 192>;
template struct ScoreTiles<fp16, 256>;
} // namespace thresher::cuda::portable
