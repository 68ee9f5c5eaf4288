// A layer's heads as XLA calls it: queries and keys normalised and rotated, values as they are or normalised.
#include <vector>

#include "norm.h"

namespace quire {
namespace {

enum Norms { NONE = 0, EACH = 1, ALL = 2, TURNED = 3 };  // of each head, of all heads together, of each once it is rotated

// The first `pairs` numbers of a head turned with as many after them.
void turn(float* x, int64_t pairs, const float* cos, const float* sin) {
  sixteens(pairs, [&](int64_t k, auto lanes) {
    f32x16 c = some(cos + k, lanes), s = some(sin + k, lanes), a = some(x + k, lanes), b = some(x + pairs + k, lanes);
    keep(x + k, lanes, a * c - b * s), keep(x + pairs + k, lanes, b * c + a * s);
  });
}

// Arrays that a case does not have come empty: cosines and sines, and the norms' scales.
const char* heads(const Call& call) {
  Buffer qkv = call.array(0), cos = call.array(1), sin = call.array(2), scales[2] = {call.array(3), call.array(4)};
  const int64_t T = qkv.dim(0), H = qkv.dim(2), N = call.attribute<int32_t>("queries"), K = call.attribute<int32_t>("keys");
  const int64_t pairs = cos.size() ? cos.dim(1) : 0, values = call.attribute<int32_t>("tied") ? N : N + K;
  const auto norms = static_cast<Norms>(call.attribute<int32_t>("norm"));
  const float eps = call.attribute<float>("eps");
  const bool norms_values = call.attribute<int32_t>("value_norm") != 0;

  // `count` heads from `first` on into a result; `turned` are queries or keys.
  auto part = [&](int64_t row, int64_t first, int64_t count, Buffer to, Norms kind, const Buffer* scale, bool turned) {
    static thread_local std::vector<float> room;
    room.resize(count * H);
    float* x = room.data();
    Row from(qkv, 0);
    int64_t at = (row * qkv.dim(1) + first) * H;
    sixteens(count * H, [&](int64_t k, auto lanes) { keep(x + k, lanes, some(from, at + k, lanes)); });
    Norm norm{scale && scale->size() ? scale : nullptr, nullptr, false, eps};
    if (kind == ALL) norm.apply(x, count * H);
    for (int64_t head = 0; head < count; ++head) {
      if (kind == EACH) norm.apply(x + head * H, H);
      if (turned) turn(x + head * H, pairs, cos.data<float>() + row * pairs, sin.data<float>() + row * pairs);
      if (kind == TURNED) norm.apply(x + head * H, H);
    }
    Place place(to, row);
    sixteens(count * H, [&](int64_t k, auto lanes) { place.put(k, lanes, some(x + k, lanes)); });
  };

  int64_t used = (rows_used(qkv) + qkv.dim(1) - 1) / qkv.dim(1);  // zeros stay zeros
  for (int64_t i = 0; i < call.results(); ++i) {
    int64_t row = call.result(i).bytes() / T;
    std::memset(call.result(i).data<char>() + used * row, 0, (T - used) * row);
  }
  Pool pool = call.pool();
  each_row(pool, used, qkv.dim(1) * H, [&](int64_t row) {
    part(row, 0, N, call.result(0), norms, scales, pairs > 0);
    if (!K) return;
    part(row, N, K, call.result(1), norms, scales + 1, pairs > 0);
    part(row, values, K, call.result(2), norms_values ? EACH : NONE, nullptr, false);
  });
  return nullptr;
}

constexpr auto ANY = dtype::ANY, F32 = dtype::F32;

}  // namespace

QUIRE_KERNEL(heads, {{ANY, F32, F32, ANY, ANY}, {"eps", "keys", "norm", "queries", "tied", "value_norm"}})

}  // namespace quire
