// A legal small problem, drawn from the input.
#pragma once

#include <algorithm>
#include <random>

#include "case.h"

namespace fuzz {

inline Sizes draw_sizes(Bytes& in) {
  static constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16,
                                     DType::kFloat16};
  Sizes s;
  s.dtype = kTypes[in.below(4)];
  s.batched = in.flag();
  s.head_major = in.flag();
  s.batch = s.batched ? in.between(0, 3) : 1;
  s.tokens = s.keys = in.between(0, 40);
  s.kv_heads = in.between(1, 3);
  s.proxy_kv_heads = in.between(1, 2);
  s.proxy_heads = s.proxy_kv_heads * in.between(1, 3);
  s.q_heads = s.kv_heads * s.proxy_heads; // divisible by both
  s.dim = in.between(1, 20);
  s.proxy_dim = in.between(1, 20);
  s.top_k = in.between(1, 6);
  return s;
}

inline void draw_problem(Bytes& in, const Sizes& s, thresher::Problem* p) {
  // Large blocks cost time and few of their keys exist: rarely.
  p->block_size = in.below(16) ? in.between(1, 24) : 1 << in.below(11);
  p->top_k_blocks = static_cast<int32_t>(s.top_k);
  p->init_blocks = in.below(p->top_k_blocks + 1);
  p->local_blocks = in.below(p->top_k_blocks - p->init_blocks + 1);
  p->softmax_scale = 0.25;
  p->proxy_scale = in.flag() ? -0.25 : 0.25;
}

// Packed: cuts the tokens into documents, padding at the end; now and then the fragments of context
// parallelism, where several share the keys of one document.
inline void draw_fragments(Bytes& in, const Sizes& s, Case* c) {
  if (s.batched || in.flag())
    return;
  const int32_t count = in.below(6);
  std::vector<int32_t>& q = c->q_begin;
  q.assign(1, 0);
  for (int32_t f = 0; f < count; ++f)
    q.push_back(in.between(0, static_cast<int32_t>(s.tokens)));
  std::sort(q.begin(), q.end());
  if (in.flag()) {
    c->k_begin.assign(static_cast<size_t>(count), 0);
    for (int32_t f = 0; f < count; ++f)
      c->k_len.push_back(in.between(0, static_cast<int32_t>(s.keys)));
  }
  for (std::vector<int32_t>* x : {&q, &c->k_begin, &c->k_len})
    x->shrink_to_fit();
  c->point_fragments();
}

// Small numbers, or any bits at all (NaN and infinity among them).
inline void draw_values(Bytes& in, Case* c) {
  std::minstd_rand random(1U + in.byte());
  const bool any_bits = in.below(8) == 0;
  for (int n = 0; n < kTensors; ++n) {
    std::vector<char>& memory = c->memory[n];
    const Tensor& t = c->tensor[n];
    if (!t)
      continue;
    if (any_bits) {
      for (char& byte : memory)
        byte = static_cast<char>(random());
      continue;
    }
    // -1.75 .. 1.75: the upper bits of a float are those of a bfloat16, and an fp16 of these bits
    // is a small number too.
    const size_t size = thresher::element_size(t.dtype);
    const size_t offset = static_cast<size_t>(static_cast<const char*>(t.data) - memory.data());
    for (size_t i = offset; i + size <= memory.size(); i += size) {
      const float f = static_cast<float>(static_cast<int>(random() % 15) - 7) / 4;
      const double d = static_cast<double>(f);
      if (size == 8)
        std::memcpy(&memory[i], &d, 8);
      else
        std::memcpy(&memory[i], reinterpret_cast<const char*>(&f) + 4 - size, size);
    }
  }
  std::fill(c->memory[kIndices].begin(), c->memory[kIndices].end(), static_cast<char>(-1));
}

} // namespace fuzz
