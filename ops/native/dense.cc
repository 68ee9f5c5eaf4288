// Entry to the products with float32 or bfloat16 weights: FORMAT is F32 or Bf16.
#include "rows.h"

namespace quire {
namespace {

const char* dense(const Call& call) {
  return run_products<FORMAT>(call, [](const ProductCall& p) { return FORMAT{p.weight().data<FORMAT::Weight>()}; });
}

constexpr auto weights = sizeof(FORMAT::Weight) == 4 ? dtype::F32 : dtype::BF16;

}  // namespace

QUIRE_KERNEL(dense, {{dtype::FLOATS, weights, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
