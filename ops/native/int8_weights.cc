// The entry to the products of int8 weights with rows of bfloat16.
#include "rows.h"

namespace quire {
namespace {

const char* int8_weights(const Call& call) {
  return products<Int8Wide>(
      call, [](const Product& p) { return Int8Wide{p.weight().data<int8_t>(), p.weight(2).data<float>()}; });
}

}  // namespace

QUIRE_KERNEL(int8_weights, {{dtype::FLOATS, dtype::S8, dtype::F32, dtype::S32, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
