// The entries to the products of codes with a scale a group of inputs: -DFORMAT is a kernel's format, -DSCALE its scales.
#include "rows.h"

#if !defined(SCALE)
#define SCALE Wide
#endif

namespace quire {
namespace {

const char* grouped(const Call& call) {
  return grouped_products<FORMAT>(call, [](const Product& p, int64_t) {
    using Each = SCALE::Each;
    return Shared<SCALE>{SCALE(p.weight(2).data<Each>()), SCALE(p.weight(3).given<Each>())};
  });
}

constexpr auto SCALES = std::is_same_v<SCALE, Wide> ? dtype::F32 : dtype::F16;

}  // namespace

QUIRE_KERNEL(grouped, {{dtype::FLOATS, CODES, SCALES, SCALES, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
