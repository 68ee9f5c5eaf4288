// The door to the products of float32 or bfloat16 weights: FORMAT is F32 or Bf16.
#include "rows.h"

namespace quire {
namespace {

const char* dense(const Call& call) {
  Pool pool = call.pool();
  return each_product(call, 3, [&](const Product& p) {
    Buffer x = p.rows(), w = p.weight(1);
    int64_t T = rows_used(x), K = w.dim(1) * w.dim(3);
    Out out = p.out(2, w.dim(0));
    using X = FORMAT::X;
    product(pool, FORMAT{w.data<X>()}, Padded<X>(pool, x, T, K).rows, T, K, out);
    out.fill(T, rows_in(x));
  });
}

constexpr auto weights = sizeof(FORMAT::X) == 4 ? dtype::F32 : dtype::BF16;

}  // namespace

QUIRE_KERNEL(dense, {{dtype::ANY, weights, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
