// mbarriers, bulk tensor copies, register hand-over between warpgroups.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace thresher::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_u32(&barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_u32(&barrier)) : "memory");
}
// One arrival that also announces `bytes` of bulk copies.
__device__ __forceinline__ void barrier_expect(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_u32(&barrier)),
               "r"(bytes)
               : "memory");
}
// One arrival once all cp.async of this thread so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_u32(&barrier))
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t& barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(shared_u32(&barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}

// Makes this thread's ordinary shared-memory writes visible to wgmma and bulk copies.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Box at (column, head, row, batch) of a [N, S, H, D] tensor; outside the tensor it is zeros.
__device__ __forceinline__ void copy_box(uint32_t to_shared, const CUtensorMap* map, int column,
                                         int head, int row, int batch, uint64_t& barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to_shared),
               "l"(map), "r"(column), "r"(head), "r"(row), "r"(batch), "r"(shared_u32(&barrier))
               : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

} // namespace thresher::cuda::sm90
