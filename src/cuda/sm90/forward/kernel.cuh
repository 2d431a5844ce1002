// One CTA a multiprocessor: warpgroup 0 produces (one warp of it, or all),
// warpgroups 1 to 3 consume.
// Roles, barriers and the shared-memory map: docs/kernels/forward.md.
#pragma once

#include "cuda/sm90/forward/mainloop.cuh"
#include "cuda/sm90/forward/producer.cuh"

namespace thresher::cuda::sm90::forward {

template <class T, int kHeads>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap v, const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kBlocks; ++i) {
      barrier_init(s.block_full[i], 1);
      barrier_init(s.block_empty[i], 4 * Config::kConsumers); // every consumer warp
    }
    for (int i = 0; i < Config::kStages; ++i) {
      barrier_init(s.rows_full[i], 1);
      barrier_init(s.rows_empty[i], 4); // the warps of the one warpgroup that took the tile
    }
    barrier_init(s.tail, 1);
    fence_barrier_init();
    fence_async_proxy();
  }
  __syncthreads();
  ptx::wait_for_predecessor();

  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == 0) {
    give_registers<Config::kProducerRegisters>();
    if (__shfl_sync(~0u, threadIdx.x >> 5, 0) < kProducerWarps<kHeads>)
      Producer<kHeads>(s, params, {&q, &k, &v}).run();
  } else {
    take_registers<Config::kConsumerRegisters>();
    consume<T, kHeads>(s, params);
  }
}

} // namespace thresher::cuda::sm90::forward
