// The table of an instruction set's entry points, filled by one function a file.
#pragma once

#include "cpu/args.h"

#ifndef THRESHER_ISA
#error "kernel files are compiled once per instruction set: define THRESHER_ISA"
#endif

namespace thresher::cpu::THRESHER_ISA {

// One table a dtype, in the order of DType: fp32, fp64, bf16, fp16.
void fill_select(Kernels* tables);
void fill_attend(Kernels* tables);
void fill_backward(Kernels* tables);
void fill_tables(Kernels* tables);

} // namespace thresher::cpu::THRESHER_ISA
