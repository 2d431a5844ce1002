// One CTA a multiprocessor: warpgroups 0 and 1 consume, warpgroup 2 produces (one warp of it,
// or all). Roles, barriers and the shared-memory map: docs/kernels/backward.md.
#pragma once

#include "cuda/sm90/backward/mainloop.cuh"
#include "cuda/sm90/backward/producer.cuh"

namespace thresher::cuda::sm90::backward {

template <class T, int kHeads, bool kTeacher, bool kDeterministic>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap dout,
                    const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
                    const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Config::kConsumers;
    for (int i = 0; i < Config::kBlocks; ++i) {
      barrier_init(s.block_full[i], 1);
      barrier_init(s.block_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      barrier_init(s.rows_full[i], 1 + 32); // bulk copies, and cp.async of a warp's lanes
      barrier_init(s.rows_empty[i], kConsumerWarps);
    }
    fence_barrier_init();
    fence_async_proxy();
  }
  if constexpr (kTeacher)
    write_head_mean<T, kHeads>(s, kTeacherScale / (kHeads * params.parts));
  __syncthreads();

  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == Config::kConsumers) {
    give_registers<Config::kProducerRegisters>();
    if (__shfl_sync(~0u, threadIdx.x >> 5, 0) < 4 * Config::kConsumers + kProducerWarps<kHeads>)
      produce<kHeads, kDeterministic>(s, params, {&q, &dout, &k, &v});
  } else {
    take_registers<Config::kConsumerRegisters>();
    consume<T, kHeads, kTeacher, kDeterministic>(s, params);
  }
}

} // namespace thresher::cuda::sm90::backward
