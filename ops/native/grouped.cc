// Entries to the products with codes that have a scale per group of inputs. FORMAT is the format, CODES the element
// type of its codes, SCALE_TYPE the type of its scales and minimums.
#include "rows.h"

#if !defined(SCALE_TYPE)
#define SCALE_TYPE Float32Scale
#endif

namespace quire {
namespace {

const char* grouped(const Call& call) {
  return run_grouped_products<FORMAT>(call, [](const ProductCall& p, int64_t) {
    using Scale = SCALE_TYPE;
    using Stored = Scale::Stored;
    return GroupParams<Scale>{Scale(p.weight(2).data<Stored>()), Scale(p.weight(3).data_or_null<Stored>())};
  });
}

constexpr auto SCALES = std::is_same_v<SCALE_TYPE, Float32Scale> ? dtype::F32 : dtype::F16;

}  // namespace

QUIRE_KERNEL(grouped, {{dtype::FLOATS, CODES, SCALES, SCALES, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
