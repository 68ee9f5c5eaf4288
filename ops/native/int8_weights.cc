// The door to the products of int8 weights with rows of bfloat16.
#include "rows.h"

namespace quire {
namespace {

const char* int8_weights(const Call& call) {
  Pool pool = call.pool();
  return each_product(call, 5, [&](const Product& p) {
    Buffer x = p.rows(), w = p.weight(1);
    int64_t T = rows_used(x), K = w.dim(1) * w.dim(3);
    Out out = p.out(4, w.dim(0));
    Int8Wide f{w.data<int8_t>(), p.weight(2).data<float>()};
    product(pool, f, Padded<uint16_t>(pool, x, T, K).rows, T, K, out);
    out.fill(T, rows_in(x));
  });
}

}  // namespace

QUIRE_KERNEL(int8_weights, {{dtype::ANY, dtype::S8, dtype::F32, dtype::S32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
