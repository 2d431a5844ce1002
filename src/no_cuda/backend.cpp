// Stands in for the CUDA backend in a build without it: every operation says how to get one.
#include "core/backend.h"

namespace thresher::cuda {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kNotSupported, "device",
              "this build has no CUDA backend: rebuild with THRESHER_CUDA=ON (nvcc 12.8 or later), "
              "or pass CPU tensors");
}

} // namespace

size_t select_blocks_workspace_size(const SelectParams&, const Shapes&, const Device&) {
  refuse();
}
void select_blocks(const SelectParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
size_t sparse_forward_workspace_size(const ForwardParams&, const Shapes&, const Device&) {
  refuse();
}
void sparse_forward(const ForwardParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
size_t sparse_backward_workspace_size(const BackwardParams&, const Shapes&, const Device&) {
  refuse();
}
void sparse_backward(const BackwardParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
size_t warmup_forward_workspace_size(const ForwardParams&, const Shapes&, const Device&) {
  refuse();
}
void warmup_forward(const ForwardParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
size_t warmup_backward_workspace_size(const BackwardParams&, const Shapes&, const Device&) {
  refuse();
}
void warmup_backward(const BackwardParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
size_t proxy_kl_workspace_size(const KlParams&, const Shapes&, const Device&) {
  refuse();
}
void proxy_kl(const KlParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
size_t check_block_indices_workspace_size(const ForwardParams&, const Shapes&, const Device&) {
  refuse();
}
void check_block_indices(const ForwardParams&, const Shapes&, const Workspace&, const Device&) {
  refuse();
}
std::string devices_json() {
  return "[]";
}

} // namespace thresher::cuda
