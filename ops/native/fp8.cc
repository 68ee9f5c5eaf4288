// The entry to the products of FP8 weights, with a scale an output or a group of inputs.
#include "rows.h"

namespace quire {
namespace {

const char* fp8(const Call& call) {
  return products<Bytes<Floats8>>(call, [](const Product& p) {
    Buffer scale = p.weight(2);
    return Bytes<Floats8>{p.weight().data<uint8_t>(), scale.data<float>(), p.inputs() / scale.dim(1)};
  });
}

}  // namespace

QUIRE_KERNEL(fp8, {{dtype::ANY, dtype::U8, dtype::F32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
