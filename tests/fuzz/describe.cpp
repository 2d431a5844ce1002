// Problem descriptions: legal ones, which must run; legal ones with a few fields changed to
// anything; and ones of any size without memory, which only workspace sizes are asked for. Memory
// is never promised that is not there, everything else is allowed.
#include "call.h"
#include "draw.h"

namespace {

using namespace fuzz;

void change_tensor(Bytes& in, Tensor* t) {
  switch (in.below(6)) {
  case 0:
    t->shape[in.below(4)] = in.wild();
    break;
  case 1:
    t->shape[in.below(4)] += in.between(-1, 1);
    break;
  case 2:
    t->stride[in.below(4)] = in.wild();
    break;
  case 3:
    t->dtype = static_cast<DType>(in.flag() ? in.below(8) : in.wild32());
    break;
  case 4:
    t->rank = in.flag() ? in.between(-1, 6) : in.wild32();
    break;
  default:
    if (in.flag())
      *t = {};
    t->data = nullptr;
  }
}

void change_fragments(Bytes& in, Case* c) {
  thresher::Fragments& f = c->problem.fragments;
  if (!f.q_begin)
    return;
  std::vector<int32_t>* arrays[] = {&c->q_begin, &c->k_begin, &c->k_len};
  std::vector<int32_t>& array = *arrays[in.below(3)];
  switch (in.below(4)) {
  case 0:
    if (!array.empty())
      array[static_cast<size_t>(in.below(static_cast<int32_t>(array.size())))] = in.wild32();
    break;
  case 1:
    (in.flag() ? f.k_begin : f.k_len) = nullptr;
    break;
  case 2:
    f.q_begin = nullptr;
    break;
  default: // never more than there are, unless it is refused for its size alone
    const int64_t count = in.wild();
    f.count = count < f.count || count > (int64_t{1} << 31) ? count : f.count;
  }
}

void change_problem(Bytes& in, Case* c) {
  thresher::Problem& p = c->problem;
  switch (in.below(8)) {
  case 0:
    p.block_size = in.wild32();
    break;
  case 1:
    p.top_k_blocks = in.wild32();
    break;
  case 2:
    p.init_blocks = in.wild32();
    break;
  case 3:
    p.local_blocks = in.wild32();
    break;
  case 4:
    p.softmax_scale = in.raw<double>();
    break;
  case 5:
    p.proxy_scale = in.raw<double>();
    break;
  case 6:
    c->device.type = static_cast<thresher::DeviceType>(in.flag() ? 1 : in.wild32());
    break;
  default:
    c->device.index = in.wild32();
  }
}

// Any sizes, one story: every tensor agrees, none has memory.
void any_sizes(Bytes& in) {
  Sizes s = draw_sizes(in);
  Case c;
  draw_problem(in, s, &c.problem);
  int64_t* const fields[] = {&s.batch,       &s.tokens,         &s.keys, &s.q_heads,   &s.kv_heads,
                             &s.proxy_heads, &s.proxy_kv_heads, &s.dim,  &s.proxy_dim, &s.top_k};
  constexpr int32_t kFields = sizeof fields / sizeof fields[0];
  for (int i = in.below(8); i > 0; --i)
    *fields[in.below(kFields)] = in.wild();
  if (in.flag())
    s.keys = s.tokens;
  if (in.flag())
    s.q_heads = s.proxy_heads = s.kv_heads;
  c.describe(s);
  c.problem.top_k_blocks = static_cast<int32_t>(s.top_k);
  alignas(16) static char somewhere[16];
  for (Tensor& t : c.tensor)
    t.data = somewhere;
  call_all(c, false);
}

void legal_and_changed(Bytes& in) {
  const Sizes s = draw_sizes(in);
  Case c;
  draw_problem(in, s, &c.problem);
  draw_fragments(in, s, &c);
  c.describe(s);
  const int changes = in.below(4);
  const bool odd = changes > 0 && in.below(8) == 0;
  c.allocate(odd ? in.below(kTensors) : -1, 1 + static_cast<size_t>(in.below(8)));
  draw_values(in, &c);
  for (int i = 0; i < changes; ++i)
    switch (in.below(4)) {
    case 0:
      change_problem(in, &c);
      break;
    case 1:
      change_fragments(in, &c);
      break;
    default:
      change_tensor(in, &c.tensor[in.below(kTensors)]);
    }
  const Spoil spoil =
      changes > 0 && in.below(8) == 0 ? static_cast<Spoil>(in.below(4)) : Spoil::kNothing;
  const auto error = call_all(c, c.honest(), spoil);
  if (changes == 0 && error)
    fail("legal problem", *error);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  in.below(4) == 0 ? any_sizes(in) : legal_and_changed(in);
  return 0;
}
