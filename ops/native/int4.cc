// The entry to the products of int4 weights: -DFORMAT is a kernel's format.
#include "rows.h"

namespace quire {
namespace {

const char* int4(const Call& call) {
  return grouped_products<FORMAT>(call, [](const Product& p, int64_t) {
    return Shared<Float16>{Float16(p.weight(2).data<uint16_t>()), Float16(nullptr), p.weight(3).given<uint8_t>()};
  });
}

}  // namespace

QUIRE_KERNEL(int4, {{dtype::FLOATS, dtype::U32, dtype::F16, dtype::U8, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
