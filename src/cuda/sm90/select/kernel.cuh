// One persistent CTA a multiprocessor: warpgroup 0 produces (one thread of it), 1 and 2 consume.
// Roles, barriers and the shared-memory map: docs/kernels/select.md.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/sm90/select/mainloop.cuh"
#include "cuda/sm90/select/producer.cuh"

namespace thresher::cuda::sm90::select {

// Role: what the consumer warpgroups do; measurements put another one in.
template <class T, class C, template <class, class> class Role = Consumer>
__global__ void __launch_bounds__(C::kThreads, 1)
    select_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                  const __grid_constant__ Params params) {
  static_assert(sizeof(Shared<C>) <= Shared<C>::kLimit);
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<C>& s = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 0) {
    barrier_init(s.query_full, 1);
    barrier_init(s.query_empty, 4 * C::kConsumers); // every consumer warp
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(s.keys_full[i], 1);
      barrier_init(s.keys_empty[i], 4 * C::kConsumers);
    }
    fence_barrier_init();
    fence_async_proxy();
  }
  __syncthreads();
  ptx::wait_for_predecessor();

  if (__shfl_sync(~0u, threadIdx.x >> 7, 0) == 0) {
    give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0)
      Producer<C>(s, params, &q, &k).run();
  } else {
    take_registers<C::kConsumerRegisters>();
    Role<T, C>(s, params).run();
  }
}

} // namespace thresher::cuda::sm90::select
