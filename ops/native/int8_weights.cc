// Entry to the products with int8 weights and rows that are not quantised.
#include "rows.h"

namespace quire {
namespace {

const char* int8_weights(const Call& call) {
  return run_products<Int8Weights>(call, [](const ProductCall& p) {
    return Int8Weights{p.weight().data<int8_t>(), p.weight(2).data<float>()};
  });
}

}  // namespace

QUIRE_KERNEL(int8_weights, {{dtype::FLOATS, dtype::S8, dtype::F32, dtype::S32, dtype::F32, dtype::S32},
                            {"activation"},
                            dtype::FLOATS})

}  // namespace quire
