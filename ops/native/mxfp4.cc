// The door to the products of MXFP4 weights.
#include "rows.h"

namespace quire {
namespace {

const char* mxfp4(const Call& call) {
  Pool pool = call.pool();
  return each_product(call, 4, [&](const Product& p) {
    Buffer x = p.rows(), w = p.weight(1), scale = p.weight(2);
    int64_t T = rows_used(x), K = w.dim(1) * 8;
    Out out = p.out(3, w.dim(0));
    Mxfp4 f{w.data<uint32_t>(), scale.data<uint8_t>(), nullptr, nullptr, K / scale.dim(1)};
    product(pool, f, Padded<uint16_t>(pool, x, T, K).rows, T, K, out);
    out.fill(T, rows_in(x));
  });
}

}  // namespace

QUIRE_KERNEL(mxfp4, {{dtype::ANY, dtype::U32, dtype::U8, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
