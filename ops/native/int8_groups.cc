// The entry to the products of int8 weights with a scale a group of inputs.
#include "rows.h"

namespace quire {
namespace {

const char* int8_groups(const Call& call) {
  return products<Bytes<Signed>>(call, [](const Product& p) {
    Buffer scale = p.weight(2);
    return Bytes<Signed>{p.weight().data<uint8_t>(), scale.data<float>(), p.inputs() / scale.dim(1)};
  });
}

}  // namespace

QUIRE_KERNEL(int8_groups, {{dtype::ANY, dtype::U8, dtype::F32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
