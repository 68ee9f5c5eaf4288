// The entry to the products of E2M1 weights with scales of any size.
#include "rows.h"

namespace quire {
namespace {

const char* float4(const Call& call) {
  return products<Float4>(call, [](const Product& p) {
    Buffer scale = p.weight(2);
    return Float4{p.weight().data<uint32_t>(), scale.data<float>(), nullptr, nullptr, p.inputs() / scale.dim(1)};
  });
}

}  // namespace

QUIRE_KERNEL(float4, {{dtype::ANY, dtype::U32, dtype::F32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
