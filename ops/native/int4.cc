// The entry to the products of int4 weights.
#include "rows.h"

namespace quire {
namespace {

const char* int4(const Call& call) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    Buffer x = p.rows(), scale = p.weight(2);
    int64_t T = rows_used(x), K = p.inputs(), groups = scale.dim(1), group = K / groups;
    Out out = p.out();
    Padded<Int4> padded(pool, x, T, K);
    const uint8_t* zeros = p.weight(3).given<uint8_t>();
    bool summed = zeros || Counts::MADE != -8;
    std::vector<float> sums = group_sums(pool, padded.rows, summed ? T : 0, K, group);
    Int4 f{p.weight().data<uint32_t>(), scale.data<uint16_t>(), zeros, summed ? sums.data() : nullptr, group};
    product(pool, f, padded.rows, T, K, out);
    out.fill(T, rows_in(x));
  });
}

}  // namespace

QUIRE_KERNEL(int4, {{dtype::ANY, dtype::U32, dtype::F16, dtype::U8, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
