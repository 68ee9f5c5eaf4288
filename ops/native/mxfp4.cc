// The entry to the products of MXFP4 weights: -DFORMAT is a kernel's format.
#include "rows.h"

namespace quire {
namespace {

const char* mxfp4(const Call& call) {
  return grouped_products<FORMAT>(call, [](const Product& p, int64_t) {
    return Shared<Exponent>{Exponent(p.weight(2).data<uint8_t>()), Exponent(nullptr)};
  });
}

}  // namespace

QUIRE_KERNEL(mxfp4, {{dtype::FLOATS, dtype::U32, dtype::U8, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
