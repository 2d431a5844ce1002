// What a backend implements: the operations of msa.h after their checks. Workspaces are already
// known to be large enough, arguments to be legal, and T > 0.
#pragma once

#include <thresher/msa.h>

#include "core/shapes.h"

namespace thresher {

#define THRESHER_DECLARE_BACKEND_OPS                                                               \
  size_t select_blocks_workspace_size(const SelectParams&, const Shapes&, const Device&);          \
  void select_blocks(const SelectParams&, const Shapes&, const Workspace&, const Device&);         \
  size_t sparse_forward_workspace_size(const ForwardParams&, const Shapes&, const Device&);        \
  void sparse_forward(const ForwardParams&, const Shapes&, const Workspace&, const Device&);       \
  size_t sparse_backward_workspace_size(const BackwardParams&, const Shapes&, const Device&);      \
  void sparse_backward(const BackwardParams&, const Shapes&, const Workspace&, const Device&);     \
  size_t warmup_forward_workspace_size(const ForwardParams&, const Shapes&, const Device&);        \
  void warmup_forward(const ForwardParams&, const Shapes&, const Workspace&, const Device&);       \
  size_t warmup_backward_workspace_size(const BackwardParams&, const Shapes&, const Device&);      \
  void warmup_backward(const BackwardParams&, const Shapes&, const Workspace&, const Device&);     \
  size_t proxy_kl_workspace_size(const KlParams&, const Shapes&, const Device&);                   \
  void proxy_kl(const KlParams&, const Shapes&, const Workspace&, const Device&);                  \
  size_t check_block_indices_workspace_size(const ForwardParams&, const Shapes&, const Device&);   \
  void check_block_indices(const ForwardParams&, const Shapes&, const Workspace&, const Device&);

namespace cpu {
THRESHER_DECLARE_BACKEND_OPS
}
namespace cuda {
THRESHER_DECLARE_BACKEND_OPS
// JSON array of the devices found ([] without a GPU); never throws.
std::string devices_json();
} // namespace cuda

#undef THRESHER_DECLARE_BACKEND_OPS

} // namespace thresher
