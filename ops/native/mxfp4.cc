// Entry to the products with MXFP4 weights: FORMAT is the format.
#include "rows.h"

namespace quire {
namespace {

const char* mxfp4(const Call& call) {
  return run_grouped_products<FORMAT>(call, [](const ProductCall& p, int64_t) {
    return GroupParams<E8m0Scale>{E8m0Scale(p.weight(2).data<uint8_t>()), E8m0Scale(nullptr)};
  });
}

}  // namespace

QUIRE_KERNEL(mxfp4, {{dtype::FLOATS, dtype::U32, dtype::U8, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
