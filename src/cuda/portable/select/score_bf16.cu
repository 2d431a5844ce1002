#include "cuda/portable/select/score.cuh"

namespace thresher::cuda::portable {
template struct ScoreTiles<bf16, 64>;
template struct ScoreTiles<bf16, 96>;
template struct ScoreTiles<bf16, 128>;
template struct ScoreTiles<bf16, 192>;
template struct ScoreTiles<bf16, 256>;
} // namespace thresher::cuda::portable
