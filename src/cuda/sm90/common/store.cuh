// Ways out of registers that only sm_90 has.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace thresher::cuda::sm90 {

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Adds eight fp16 values; 16-byte aligned.
__device__ __forceinline__ void reduce_add(__half* address, const uint32_t (&pairs)[4]) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// 16 bytes, 16-byte aligned, past the caches' first choice. Not __stcs: the compiler may move that,
// and where it is used registers are short.
__device__ __forceinline__ void store_streaming(__half* address, const uint32_t (&pairs)[4]) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

} // namespace thresher::cuda::sm90
