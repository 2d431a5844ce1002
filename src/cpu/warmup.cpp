// The warm-up: dense causal attention and the proxy's KL over all visible keys. The passes are
// those of the sparse operations; only the list of (block, tokens) pairs differs (DenseWork).
#include "core/backend.h"
#include "cpu/passes.h"
#include "cpu/work.h"

namespace thresher::cpu {

size_t warmup_forward_workspace_size(const ForwardParams& p, const Shapes& s, const Device&) {
  return forward_workspace_size<DenseWork>(p, s);
}
void warmup_forward(const ForwardParams& p, const Shapes& s, const Workspace& w, const Device&) {
  forward<DenseWork>(p, s, w);
}
size_t warmup_backward_workspace_size(const BackwardParams& p, const Shapes& s, const Device&) {
  return backward_workspace_size<DenseWork>(p, s);
}
void warmup_backward(const BackwardParams& p, const Shapes& s, const Workspace& w, const Device&) {
  backward<DenseWork>(p, s, w);
}

} // namespace thresher::cpu
