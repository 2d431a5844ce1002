#include "cpu/dispatch.h"

#include <thresher/error.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace thresher::cpu {

namespace isa_plain {
void fill_tables(Kernels* tables);
}
#if defined(THRESHER_CPU_X86_VARIANTS)
namespace isa_v3 {
void fill_tables(Kernels* tables);
}
namespace isa_v4 {
void fill_tables(Kernels* tables);
}
#endif

namespace {

constexpr int kDTypes = 4;

struct Isa {
  const char* name;
  const char* short_name;
  bool runs;
  Kernels tables[kDTypes];
};

struct Isas {
  Isa list[3] = {{"generic", "plain", true, {}},
                 {"x86-64-v3", "v3", false, {}},
                 {"x86-64-v4", "v4", false, {}}};
  const Isa* best = &list[0];

  Isas() {
    isa_plain::fill_tables(list[0].tables);
#if defined(THRESHER_CPU_X86_VARIANTS)
    __builtin_cpu_init();
    list[1].runs = __builtin_cpu_supports("x86-64-v3");
    list[2].runs = __builtin_cpu_supports("x86-64-v4");
    isa_v3::fill_tables(list[1].tables);
    isa_v4::fill_tables(list[2].tables);
#endif
    for (Isa& isa : list) {
      for (Kernels& table : isa.tables)
        table.isa = isa.name;
      if (isa.runs)
        best = &isa;
    }
    if (const char* wanted = std::getenv("THRESHER_CPU_ISA"))
      best = find(wanted);
  }

  const Isa* find(const char* name) const {
    for (const Isa& isa : list)
      if (std::strcmp(name, isa.name) == 0 || std::strcmp(name, isa.short_name) == 0) {
        if (isa.runs)
          return &isa;
        throw Error(ErrorCode::kNotSupported, "THRESHER_CPU_ISA",
                    std::string(name) + " does not run on this processor");
      }
    throw Error(ErrorCode::kInvalidValue, "THRESHER_CPU_ISA",
                std::string(name) + " is unknown; use plain, v3 or v4");
  }
};

const Isas& isas() {
  static const Isas all;
  return all;
}

std::atomic<const Isa*> chosen{nullptr};

const Isa& current() {
  const Isa* isa = chosen.load(std::memory_order_acquire);
  return isa ? *isa : *isas().best;
}

} // namespace

const Kernels& kernels_for(DType dtype) {
  return current().tables[static_cast<int>(dtype)];
}

const char* isa_name() {
  return current().name;
}

void use_isa(const char* name) {
  chosen.store(name ? isas().find(name) : nullptr, std::memory_order_release);
}

} // namespace thresher::cpu
