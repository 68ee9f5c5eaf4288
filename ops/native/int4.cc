// Entry to the products with int4 weights, which may have zero points: FORMAT is the format.
#include "rows.h"

namespace quire {
namespace {

const char* int4(const Call& call) {
  return run_grouped_products<FORMAT>(call, [](const ProductCall& p, int64_t) {
    return GroupParams<Float16Scale>{Float16Scale(p.weight(2).data<uint16_t>()), Float16Scale(nullptr),
                                     p.weight(3).data_or_null<uint8_t>()};
  });
}

}  // namespace

QUIRE_KERNEL(int4, {{dtype::FLOATS, dtype::U32, dtype::F16, dtype::U8, dtype::F32, dtype::S32},
                    {"activation"},
                    dtype::FLOATS})

}  // namespace quire
