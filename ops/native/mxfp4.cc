// The entry to the products of MXFP4 weights.
#include "rows.h"

namespace quire {
namespace {

const char* mxfp4(const Call& call) {
  return products<Mxfp4>(call, [](const Product& p) {
    Buffer scale = p.weight(2);
    return Mxfp4{p.weight().data<uint32_t>(), scale.data<uint8_t>(), nullptr, nullptr, p.inputs() / scale.dim(1)};
  });
}

}  // namespace

QUIRE_KERNEL(mxfp4, {{dtype::ANY, dtype::U32, dtype::U8, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
