// Calls of the library as a fuzzer makes them: the result is success or thresher::Error, and after
// an Error nothing has been written. Anything else aborts.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "case.h"

namespace fuzz {

[[noreturn]] inline void fail(const char* operation, const std::string& text) {
  std::fprintf(stderr, "%s: %s\n", operation, text.c_str());
  std::abort();
}

// The error's text, or nothing on success. Errors name their argument.
template <class Call>
std::optional<std::string> error_of(const char* operation, Call&& call) {
  try {
    call();
    return {};
  } catch (const thresher::Error& error) {
    if (error.argument().empty())
      fail(operation, std::string("error without an argument: ") + error.what());
    return error.what();
  } catch (const std::exception& error) {
    fail(operation, std::string("not a thresher::Error: ") + error.what());
  }
}

constexpr size_t kMostWorkspace = size_t{64} << 20;

extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));

// A workspace of this size with forbidden zones before and after it. One block serves all inputs:
// a fresh one each would take most of the time.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : after_(data() + bytes) {
    if (!__asan_poison_memory_region)
      return;
    __asan_poison_memory_region(data() - kZone, kZone);
    __asan_poison_memory_region(after_, kZone);
  }
  ~Scratch() {
    if (__asan_unpoison_memory_region)
      __asan_unpoison_memory_region(after_, kZone);
  }
  Scratch(const Scratch&) = delete;

  static char* data() {
    static char* const block = static_cast<char*>(
        std::aligned_alloc(256, kMostWorkspace + 2 * kZone)); // ends with the process
    return block + kZone;
  }

 private:
  static constexpr size_t kZone = 4096;
  char* after_;
};

// What to do wrong with the workspace.
enum class Spoil { kNothing, kMissing, kTooSmall, kMisaligned };

template <class Params>
std::optional<std::string> call(const char* operation, const Case& c, const Params& params,
                                size_t (*size)(const Params&, const thresher::Device&),
                                void (*run)(const Params&, const thresher::Workspace&,
                                            const thresher::Device&),
                                bool runnable, Spoil spoil = Spoil::kNothing) {
  size_t bytes = 0;
  auto error = error_of(operation, [&] { bytes = size(params, c.device); });
  if (!runnable || (!error && bytes > kMostWorkspace))
    return error;
  const Scratch memory(error ? 0 : bytes);
  thresher::Workspace workspace{Scratch::data(), bytes};
  if (error)
    workspace = {}; // run must refuse before it looks
  if (spoil == Spoil::kMissing)
    workspace.data = nullptr;
  if (spoil == Spoil::kTooSmall)
    workspace.bytes -= bytes > 0 ? 1 : 0;
  if (spoil == Spoil::kMisaligned)
    workspace.data = static_cast<char*>(workspace.data) + (bytes > 0 ? 8 : 0);

  std::vector<char> before[kTensors];
  for (int n = 0; n < kTensors; ++n)
    before[n] = c.memory[n];
  const auto run_error = error_of(operation, [&] { run(params, workspace, c.device); });
  if (error && !run_error)
    fail(operation, "runs, though its workspace size was refused: " + *error);
  if (!error && bytes > 0 && spoil != Spoil::kNothing && !run_error)
    fail(operation, "a bad workspace was taken");
  for (int n = 0; run_error && n < kTensors; ++n)
    if (before[n] != c.memory[n])
      fail(operation, "wrote, then refused: " + *run_error);
  return run_error;
}

// Every operation once, in the order of a step. Returns an error, if there was one.
inline std::optional<std::string> call_all(const Case& c, bool runnable,
                                           Spoil spoil = Spoil::kNothing) {
  using namespace thresher;
  std::optional<std::string> last;
  auto one = [&](const char* name, const auto& params, auto size, auto run) {
    if (auto error = call(name, c, params, size, run, runnable, spoil))
      last = name + (" refused: " + *error);
  };
  one("select_blocks", c.select(), select_blocks_workspace_size, select_blocks);
  one("check_block_indices", c.forward(true), check_block_indices_workspace_size,
      check_block_indices);
  one("sparse_forward", c.forward(true), sparse_forward_workspace_size, sparse_forward);
  one("sparse proxy_kl", c.kl(true), proxy_kl_workspace_size, proxy_kl);
  one("sparse_backward", c.backward(true), sparse_backward_workspace_size, sparse_backward);
  one("warmup_forward", c.forward(false), warmup_forward_workspace_size, warmup_forward);
  one("dense proxy_kl", c.kl(false), proxy_kl_workspace_size, proxy_kl);
  one("warmup_backward", c.backward(false), warmup_backward_workspace_size, warmup_backward);
  return last;
}

} // namespace fuzz
