// The passes, for both kinds of work (work.h).
#pragma once

#include <thresher/params.h>

#include "core/shapes.h"
#include "cpu/args.h"

namespace thresher::cpu {

template <class Work>
size_t forward_workspace_size(const ForwardParams& params, const Shapes& shapes);
template <class Work>
void forward(const ForwardParams& params, const Shapes& shapes, const Workspace& workspace);

template <class Work>
size_t backward_workspace_size(const BackwardParams& params, const Shapes& shapes);
template <class Work>
void backward(const BackwardParams& params, const Shapes& shapes, const Workspace& workspace);

} // namespace thresher::cpu
