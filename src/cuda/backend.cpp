// The CUDA backend: what every kernel needs is checked here, then the first implementation in the
// table that takes the problem runs it.
#include "core/backend.h"

#include "cuda/common/dtype.h"
#include "cuda/common/workspace.h"
#include "cuda/index/check.h"
#include "cuda/kernel.h"

#include <initializer_list>
#include <span>

namespace thresher::cuda {
namespace {

// --- the table: operation x implementation, best first
// --------------------------------------------
constexpr const Kernel<SelectParams>* kSelectBlocks[] = {
#if THRESHER_CUDA_SM90 && THRESHER_UNPROVEN
    &sm90::select_blocks,
#endif
    &portable::select_blocks};
constexpr const Kernel<ForwardParams>* kSparseForward[] = {
#if THRESHER_CUDA_SM90
    &sm90::sparse_forward,
#endif
    &portable::sparse_forward};
constexpr const Kernel<BackwardParams>* kSparseBackward[] = {
#if THRESHER_CUDA_SM90
    &sm90::sparse_backward,
#endif
    &portable::sparse_backward};
constexpr const Kernel<ForwardParams>* kWarmupForward[] = {&portable::warmup_forward};
constexpr const Kernel<BackwardParams>* kWarmupBackward[] = {&portable::warmup_backward};
constexpr const Kernel<KlParams>* kProxyKl[] = {
#if THRESHER_CUDA_SM90 && THRESHER_UNPROVEN
    &sm90::proxy_kl,
#endif
    &portable::proxy_kl};

// --- what all of them need
// -------------------------------------------------------------------------
constexpr int kMaxTopK = 128;
constexpr int64_t kMaxTokens = (int64_t{1} << 31) - (int64_t{1} << 24); // window ends stay in int32
constexpr int kAlignedElements = 8;                                     // 16 bytes of bf16 or fp16

[[noreturn]] void unsupported(const char* argument, const std::string& text) {
  throw Error(ErrorCode::kNotSupported, argument, text + "; the CPU backend takes it");
}

struct NamedTensor {
  const char* name;
  const Tensor& tensor;
};

// Tensors of head vectors are read and written in pieces of 16 bytes.
void check_aligned(const Problem& problem, std::initializer_list<NamedTensor> tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor)
      continue;
    if (reinterpret_cast<uintptr_t>(tensor.data) % 16 != 0)
      throw Error(ErrorCode::kInvalidValue, name,
                  "data must be aligned to 16 bytes on CUDA (copy the tensor)");
    for (int axis = 0; axis + 1 < tensor.rank; ++axis)
      if (tensor.stride[axis] % kAlignedElements != 0 && tensor.shape[axis] > 1)
        throw Error(ErrorCode::kInvalidValue, name,
                    "stride " + std::to_string(tensor.stride[axis]) + " of dimension " +
                        std::to_string(axis) + " is not a multiple of " +
                        std::to_string(kAlignedElements) +
                        " elements (16 bytes), which CUDA needs (copy the tensor)");
    // A document must not jump from one batch row to the next.
    if (problem.fragments.q_begin && tensor.rank == 4 && tensor.shape[0] > 1 &&
        tensor.stride[0] != tensor.shape[1] * tensor.stride[1])
      unsupported(name,
                  "batched tensors with fragments need rows that follow each other in memory");
  }
}

void check_dim(const char* argument, int dim) {
  if (dim > kMaxHeadDim || dim % kAlignedElements != 0)
    unsupported(argument, "head dimension " + std::to_string(dim) +
                              " is not supported on CUDA: multiples of 8 up to " +
                              std::to_string(kMaxHeadDim) + " are");
}

void check_shapes(const Shapes& shapes, bool selects) {
  if (!is_half_type(shapes.dtype))
    throw Error(ErrorCode::kInvalidType, shapes.q_heads ? "q" : "q_proxy",
                "dtype is not supported on CUDA: bfloat16 and float16 are; the CPU backend takes "
                "float32 and float64 too");
  if (shapes.dim)
    check_dim("q", shapes.dim);
  if (shapes.proxy_dim)
    check_dim("q_proxy", shapes.proxy_dim);
  if (shapes.tokens > kMaxTokens || shapes.keys > kMaxTokens)
    unsupported(shapes.tokens > kMaxTokens ? "q" : "k",
                std::to_string(std::max(shapes.tokens, shapes.keys)) +
                    " tokens are more than the CUDA backend counts (2^31 - 2^24)");
  if (!selects)
    return;
  const int size = shapes.block_size;
  if (size != 32 && size != 64 && size != 128 && size != 256)
    unsupported("block_size",
                std::to_string(size) + " is not supported on CUDA: 32, 64, 128 and 256 are");
  if (shapes.top_k > kMaxTopK)
    unsupported("top_k_blocks", std::to_string(shapes.top_k) +
                                    " is not supported on CUDA: at most " +
                                    std::to_string(kMaxTopK));
}

void check_device() {
  const DeviceFacts& facts = device_facts();
  if (facts.major < 8)
    throw Error(ErrorCode::kNotSupported, "device",
                "compute capability " + std::to_string(facts.major) + "." +
                    std::to_string(facts.minor) + " is not supported: 8.0 and later are");
}

template <class Params>
const Kernel<Params>& choose(std::span<const Kernel<Params>* const> kernels, const Params& params,
                             const Shapes& shapes) {
  std::string reasons;
  for (const Kernel<Params>* kernel : kernels) {
    const std::string reason = kernel->refuses(params, shapes, device_facts());
    if (reason.empty())
      return *kernel;
    reasons += std::string(reasons.empty() ? "" : "; ") + kernel->name + " " + reason;
  }
  throw Error(ErrorCode::kNotSupported, "", "no CUDA kernel takes this problem: " + reasons);
}

void check_params(const SelectParams& p, const Shapes& shapes) {
  check_shapes(shapes, true);
  check_aligned(p.problem, {{"q_proxy", p.q_proxy}, {"k_proxy", p.k_proxy}});
}
void check_params(const ForwardParams& p, const Shapes& shapes) {
  check_shapes(shapes, static_cast<bool>(p.block_indices));
  check_aligned(p.problem, {{"q", p.q},
                            {"k", p.k},
                            {"v", p.v},
                            {"q_proxy", p.q_proxy},
                            {"k_proxy", p.k_proxy},
                            {"out", p.out}});
}
void check_params(const BackwardParams& p, const Shapes& shapes) {
  check_shapes(shapes, static_cast<bool>(p.block_indices));
  check_aligned(p.problem, {{"q", p.q},
                            {"k", p.k},
                            {"v", p.v},
                            {"q_proxy", p.q_proxy},
                            {"k_proxy", p.k_proxy},
                            {"out", p.out},
                            {"dout", p.dout},
                            {"dq", p.dq},
                            {"dk", p.dk},
                            {"dv", p.dv},
                            {"dq_proxy", p.dq_proxy},
                            {"dk_proxy", p.dk_proxy}});
}
void check_params(const KlParams& p, const Shapes& shapes) {
  check_shapes(shapes, static_cast<bool>(p.block_indices));
  check_aligned(p.problem,
                {{"q", p.q}, {"k", p.k}, {"q_proxy", p.q_proxy}, {"k_proxy", p.k_proxy}});
}

template <class Params, size_t kCount>
size_t workspace_size(const Kernel<Params>* const (&table)[kCount], const Params& params,
                      const Shapes& shapes, const Device& device) {
  const DeviceGuard guard(device.index);
  check_device();
  check_params(params, shapes);
  return choose<Params>(table, params, shapes).workspace_size(params, shapes);
}

template <class Params, size_t kCount>
void run(const Kernel<Params>* const (&table)[kCount], const Params& params, const Shapes& shapes,
         const Workspace& workspace, const Device& device) {
  const DeviceGuard guard(device.index);
  check_device();
  check_params(params, shapes);
  choose<Params>(table, params, shapes)
      .run(params, shapes, workspace, static_cast<cudaStream_t>(device.stream));
}

std::string escaped(const char* text) {
  std::string result;
  for (; *text; ++text) {
    if (*text == '"' || *text == '\\')
      result += '\\';
    if (static_cast<unsigned char>(*text) >= 0x20)
      result += *text;
  }
  return result;
}

} // namespace

size_t select_blocks_workspace_size(const SelectParams& p, const Shapes& s, const Device& d) {
  return workspace_size(kSelectBlocks, p, s, d);
}
void select_blocks(const SelectParams& p, const Shapes& s, const Workspace& w, const Device& d) {
  run(kSelectBlocks, p, s, w, d);
}
size_t sparse_forward_workspace_size(const ForwardParams& p, const Shapes& s, const Device& d) {
  return workspace_size(kSparseForward, p, s, d);
}
void sparse_forward(const ForwardParams& p, const Shapes& s, const Workspace& w, const Device& d) {
  run(kSparseForward, p, s, w, d);
}
size_t sparse_backward_workspace_size(const BackwardParams& p, const Shapes& s, const Device& d) {
  return workspace_size(kSparseBackward, p, s, d);
}
void sparse_backward(const BackwardParams& p, const Shapes& s, const Workspace& w,
                     const Device& d) {
  run(kSparseBackward, p, s, w, d);
}
size_t warmup_forward_workspace_size(const ForwardParams& p, const Shapes& s, const Device& d) {
  return workspace_size(kWarmupForward, p, s, d);
}
void warmup_forward(const ForwardParams& p, const Shapes& s, const Workspace& w, const Device& d) {
  run(kWarmupForward, p, s, w, d);
}
size_t warmup_backward_workspace_size(const BackwardParams& p, const Shapes& s, const Device& d) {
  return workspace_size(kWarmupBackward, p, s, d);
}
void warmup_backward(const BackwardParams& p, const Shapes& s, const Workspace& w,
                     const Device& d) {
  run(kWarmupBackward, p, s, w, d);
}
size_t proxy_kl_workspace_size(const KlParams& p, const Shapes& s, const Device& d) {
  return workspace_size(kProxyKl, p, s, d);
}
void proxy_kl(const KlParams& p, const Shapes& s, const Workspace& w, const Device& d) {
  run(kProxyKl, p, s, w, d);
}

size_t check_block_indices_workspace_size(const ForwardParams& p, const Shapes& s, const Device&) {
  check_shapes(s, static_cast<bool>(p.block_indices));
  return sizeof(BadEntry);
}
void check_block_indices(const ForwardParams& p, const Shapes& s, const Workspace& w,
                         const Device& d) {
  const DeviceGuard guard(d.index);
  check_device();
  check_shapes(s, true);
  check_indices(make_geometry(p.problem, s), s, p.block_indices, static_cast<BadEntry*>(w.data),
                static_cast<cudaStream_t>(d.stream));
}

std::string devices_json() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError(); // no driver or no device
    return "[]";
  }
  std::string json = "[";
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    json += std::string(json.size() > 1 ? ", " : "") + "{\"index\": " + std::to_string(device) +
            ", \"name\": \"" + escaped(properties.name) + "\", \"compute_capability\": \"" +
            std::to_string(properties.major) + "." + std::to_string(properties.minor) +
            "\", \"sm_count\": " + std::to_string(properties.multiProcessorCount) +
            ", \"memory_bytes\": " + std::to_string(properties.totalGlobalMem) +
            ", \"supported\": " + (properties.major >= 8 ? "true" : "false") + "}";
  }
  return json + "]";
}

} // namespace thresher::cuda
