// One CTA a multiprocessor: warpgroups 0 and 1 consume, warpgroup 2 produces. Roles, barriers and
// the shared-memory map: docs/kernels/kl.md.
#pragma once

#include "cuda/sm90/kl/mainloop.cuh"
#include "cuda/sm90/kl/producer.cuh"

namespace thresher::cuda::sm90::kl {

template <class T, class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    kl_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
              const __grid_constant__ CUtensorMap k_proxy,
              const __grid_constant__ Params<T> params) {
  extern __shared__ __align__(1024) uint8_t kl_memory[];
  Shared<C>& s = *reinterpret_cast<Shared<C>*>(kl_memory);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * C::kConsumers;
    barrier_init(s.keys_full, 1);
    barrier_init(s.keys_empty, kConsumerWarps);
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(s.rows_full[i], 1 + C::kProducers); // bulk copies, and every thread's cp.async
      barrier_init(s.rows_empty[i], kConsumerWarps);
    }
    fence_barrier_init();
    fence_async_proxy();
  }
  __syncthreads();

  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == C::kConsumers) {
    give_registers<C::kProducerRegisters>();
    Producer<T, C>(s, params, {&q, &k, &k_proxy}).run();
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<T, C>(s, params);
  }
}

} // namespace thresher::cuda::sm90::kl
