// The entry to the products of int8 weights with rows that become bytes too.
#include <cmath>

#include "rows.h"

namespace quire {
namespace {

// A row in float32, from either type.
struct Row {
  const void* at;
  bool wide;

  Row(Buffer x, int64_t row) : wide(x.wide()) {
    at = x.data<const char>() + row * x.last() * (wide ? 4 : 2);
  }
  f32x16 sixteen(int64_t k) const {
    return wide ? load(static_cast<const float*>(at) + k) : load_wide(static_cast<const uint16_t*>(at) + k);
  }
  float one(int64_t k) const {
    return wide ? static_cast<const float*>(at)[k] : widen(static_cast<const uint16_t*>(at)[k]);
  }
};

// Each row as signed bytes and a scale, such that its largest value is 127; a row that is not finite gets such a scale.
struct Bytes {
  std::vector<uint8_t> rows;
  std::vector<float> scale;

  Bytes(Pool& pool, Buffer x, int64_t T, int64_t K) : rows(T * K, BIAS), scale(T) {
    int64_t from = x.last(), whole = from / LANES * LANES;
    const float round = 12582912.0f;  // see `exp`
    each_row(pool, T, K, [&](int64_t row) {
      Row in(x, row);
      f32x16 most{}, poison{};
      for (int64_t k = 0; k < whole; k += LANES) {
        f32x16 v = in.sixteen(k), size = (f32x16)((u32x16)v & 0x7fffffffu);
        most = size > most ? size : most;
        poison += v * 0.0f;
      }
      float largest = 0, spoilt = 0;
      for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]), spoilt += poison[i];
      for (int64_t k = whole; k < from; ++k) largest = std::max(largest, std::fabs(in.one(k))), spoilt += in.one(k) * 0;
      scale[row] = largest / 127.0f + spoilt;
      float inverse = largest > 0 ? 127.0f / largest : 0.0f;
      uint8_t* out = rows.data() + row * K;
      for (int64_t k = 0; k < whole; k += LANES) {
        u8x16 bytes = __builtin_convertvector((u32x16)(in.sixteen(k) * inverse + round) - 0x4b400000u + BIAS, u8x16);
        std::memcpy(out + k, &bytes, LANES);
      }
      for (int64_t k = whole; k < from; ++k) {
        float shifted = in.one(k) * inverse + round;
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        out[k] = static_cast<uint8_t>(bits - 0x4b400000u + BIAS);
      }
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

QUIRE_KERNEL(int8, {{dtype::ANY, dtype::S8, dtype::F32, dtype::S32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
