// The entries to the products of codes with scales in two levels: -DFORMAT is a kernel's format.
#include "rows.h"

namespace quire {
namespace {

const char* levels(const Call& call) {
  return grouped_products<FORMAT>(call, [](const Product& p, int64_t group) {
    auto of = [&](int64_t i) {
      return Levels{p.weight(i).given<int8_t>(), p.weight(i + 2).given<uint16_t>(), Levels::SUPER / group};
    };
    return Shared<Levels>{of(2), of(3)};
  });
}

}  // namespace

QUIRE_KERNEL(levels, {{dtype::FLOATS, dtype::U32, dtype::S8, dtype::S8, dtype::F16, dtype::F16, dtype::F32, dtype::S32},
                      {"activation"}, dtype::FLOATS})

}  // namespace quire
