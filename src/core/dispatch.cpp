// The public operations: check, then the backend of the device.
#include "core/backend.h"
#include "core/check.h"

namespace thresher {
namespace {

template <class Params>
struct Backend {
  size_t (*workspace_size)(const Params&, const Shapes&, const Device&);
  void (*run)(const Params&, const Shapes&, const Workspace&, const Device&);
};

template <class Params>
struct Operation {
  Backend<Params> cpu, cuda;

  const Backend<Params>& on(const Device& device) const {
    return device.type == DeviceType::kCuda ? cuda : cpu;
  }
  // A call without query tokens computes nothing; the backends never see one.
  size_t workspace_size(const Params& params, const Shapes& shapes, const Device& device) const {
    return shapes.tokens > 0 ? on(device).workspace_size(params, shapes, device) : 0;
  }
  void run(const Params& params, const Shapes& shapes, const Workspace& workspace,
           const Device& device) const {
    if (shapes.tokens == 0)
      return;
    check_workspace(workspace, on(device).workspace_size(params, shapes, device));
    on(device).run(params, shapes, workspace, device);
  }
};

constexpr Operation<SelectParams> kSelectBlocks = {
    {cpu::select_blocks_workspace_size, cpu::select_blocks},
    {cuda::select_blocks_workspace_size, cuda::select_blocks}};
constexpr Operation<ForwardParams> kSparseForward = {
    {cpu::sparse_forward_workspace_size, cpu::sparse_forward},
    {cuda::sparse_forward_workspace_size, cuda::sparse_forward}};
constexpr Operation<BackwardParams> kSparseBackward = {
    {cpu::sparse_backward_workspace_size, cpu::sparse_backward},
    {cuda::sparse_backward_workspace_size, cuda::sparse_backward}};
constexpr Operation<ForwardParams> kWarmupForward = {
    {cpu::warmup_forward_workspace_size, cpu::warmup_forward},
    {cuda::warmup_forward_workspace_size, cuda::warmup_forward}};
constexpr Operation<BackwardParams> kWarmupBackward = {
    {cpu::warmup_backward_workspace_size, cpu::warmup_backward},
    {cuda::warmup_backward_workspace_size, cuda::warmup_backward}};
constexpr Operation<KlParams> kProxyKl = {{cpu::proxy_kl_workspace_size, cpu::proxy_kl},
                                          {cuda::proxy_kl_workspace_size, cuda::proxy_kl}};
constexpr Operation<ForwardParams> kCheckBlockIndices = {
    {cpu::check_block_indices_workspace_size, cpu::check_block_indices},
    {cuda::check_block_indices_workspace_size, cuda::check_block_indices}};

} // namespace

size_t select_blocks_workspace_size(const SelectParams& p, const Device& d) {
  return kSelectBlocks.workspace_size(p, check(p, d), d);
}
void select_blocks(const SelectParams& p, const Workspace& w, const Device& d) {
  kSelectBlocks.run(p, check(p, d), w, d);
}
size_t sparse_forward_workspace_size(const ForwardParams& p, const Device& d) {
  return kSparseForward.workspace_size(p, check(p, d, Keys::kSelected), d);
}
void sparse_forward(const ForwardParams& p, const Workspace& w, const Device& d) {
  kSparseForward.run(p, check(p, d, Keys::kSelected), w, d);
}
size_t sparse_backward_workspace_size(const BackwardParams& p, const Device& d) {
  return kSparseBackward.workspace_size(p, check(p, d, Keys::kSelected), d);
}
void sparse_backward(const BackwardParams& p, const Workspace& w, const Device& d) {
  kSparseBackward.run(p, check(p, d, Keys::kSelected), w, d);
}
size_t warmup_forward_workspace_size(const ForwardParams& p, const Device& d) {
  return kWarmupForward.workspace_size(p, check(p, d, Keys::kVisible), d);
}
void warmup_forward(const ForwardParams& p, const Workspace& w, const Device& d) {
  kWarmupForward.run(p, check(p, d, Keys::kVisible), w, d);
}
size_t warmup_backward_workspace_size(const BackwardParams& p, const Device& d) {
  return kWarmupBackward.workspace_size(p, check(p, d, Keys::kVisible), d);
}
void warmup_backward(const BackwardParams& p, const Workspace& w, const Device& d) {
  kWarmupBackward.run(p, check(p, d, Keys::kVisible), w, d);
}
size_t proxy_kl_workspace_size(const KlParams& p, const Device& d) {
  return kProxyKl.workspace_size(p, check(p, d), d);
}
void proxy_kl(const KlParams& p, const Workspace& w, const Device& d) {
  kProxyKl.run(p, check(p, d), w, d);
}
size_t check_block_indices_workspace_size(const ForwardParams& p, const Device& d) {
  return kCheckBlockIndices.workspace_size(p, check_for_indices(p, d), d);
}
void check_block_indices(const ForwardParams& p, const Workspace& w, const Device& d) {
  kCheckBlockIndices.run(p, check_for_indices(p, d), w, d);
}

} // namespace thresher
