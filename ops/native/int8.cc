// The entry to the products of int8 weights with rows that become bytes too.
#include "rows.h"

namespace quire {
namespace {

// Each row as signed bytes and a scale, such that its largest value is 127; a row that is not finite gets such a scale.
struct Bytes {
  std::vector<uint8_t> rows;
  std::vector<float> scale;

  Bytes(Pool& pool, Buffer x, int64_t T, int64_t K) : rows(T * K, BIAS), scale(T) {
    each_row(pool, T, K, [&](int64_t row) {
      scale[row] = row_of(x, row).bytes(0, x.last(), rows.data() + row * K, BIAS).scale;
    });
  }
};

const char* int8(const Call& call) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    Buffer x = p.rows();
    int64_t T = rows_used(x), K = p.inputs();
    Out out = p.out();
    Bytes bytes(pool, x, T, K);
    Int8 f{p.weight().data<int8_t>(), p.weight(2).data<float>(), p.weight(3).data<int32_t>(), bytes.scale.data()};
    product(pool, f, bytes.rows.data(), T, K, out);
    out.fill(T, rows_in(x));
  });
}

}  // namespace

QUIRE_KERNEL(int8, {{dtype::FLOATS, dtype::S8, dtype::F32, dtype::S32, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
