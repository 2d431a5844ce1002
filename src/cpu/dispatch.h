// The kernels of the best instruction set that this processor has.
#pragma once

#include <thresher/params.h>

#include "cpu/args.h"

namespace thresher::cpu {

// THRESHER_CPU_ISA (plain, v3, v4) in the environment chooses a lower one.
const Kernels& kernels_for(DType dtype);
// Name of the instruction set in use: "x86-64-v4", "x86-64-v3" or "generic".
const char* isa_name();

// For tests and benchmarks: chooses one by name (throws if it does not run here); null: the
// default.
void use_isa(const char* name);

} // namespace thresher::cpu
