// Entry to the products with int8 weights and int8 activations.
#include "rows.h"

namespace quire {
namespace {

// Rows quantised to int8 with a scale each. If a row is not finite, its scale is not finite either.
struct Int8Rows {
  std::vector<uint8_t> values;  // plus INT8_ROW_OFFSET
  std::vector<float> scale;

  Int8Rows(Pool& pool, Buffer x, int64_t T, int64_t K) : values(T * K, INT8_ROW_OFFSET), scale(T) {
    for_each_row(pool, T, K, [&](int64_t row) {
      scale[row] = input_row(x, row).quantise_int8(0, x.last_dim(), values.data() + row * K, INT8_ROW_OFFSET).scale;
    });
  }
};

const char* int8(const Call& call) {
  Pool pool = call.pool();
  return for_each_product(call, [&](const ProductCall& p) {
    Buffer x = p.rows();
    int64_t T = rows_used(x), K = p.inputs();
    Output out = p.output();
    Int8Rows rows(pool, x, T, K);
    Int8 f{p.weight().data<int8_t>(), p.weight(2).data<float>(), p.weight(3).data<int32_t>(), rows.scale.data()};
    product(pool, f, rows.values.data(), T, K, out);
    out.fill_zero_rows(T, num_rows(x));
  });
}

}  // namespace

QUIRE_KERNEL(int8, {{dtype::FLOATS, dtype::S8, dtype::F32, dtype::S32, dtype::F32, dtype::S32},
                    {"activation"},
                    dtype::FLOATS})

}  // namespace quire
