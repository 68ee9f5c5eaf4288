// Norms of a row, as `quire.ops.norm` defines them. Sums are over sixteen numbers at a time, and then over those halves by
// halves: in the same order in any company.
#pragma once

#include "row.h"

namespace quire {

// Calls take(k, lanes) for every sixteen of `size` numbers, where `lanes` is a constant, and for those that are left over.
template <typename Take>
void sixteens(int64_t size, const Take& take) {
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) take(k, std::integral_constant<int64_t, LANES>());
  if (k < size) take(k, size - k);
}

// Up to sixteen numbers, zeros after them; and their way back.
template <typename Lanes>
f32x16 get(const float* x, Lanes lanes) {
  if (lanes == LANES) return load(x);
  float part[LANES] = {};
  std::memcpy(part, x, lanes * sizeof(float));
  return load(part);
}
template <typename Lanes>
f32x16 get(Row row, int64_t k, Lanes lanes) {
  if (lanes == LANES) return row.sixteen(k);
  float part[LANES] = {};
  for (int64_t i = 0; i < lanes; ++i) part[i] = row.one(k + i);
  return load(part);
}
template <typename Lanes>
void put(float* x, Lanes lanes, f32x16 all) {
  if (lanes == LANES) return store(x, all);
  float part[LANES];
  store(part, all);
  std::memcpy(x, part, lanes * sizeof(float));
}

inline void read(Row from, int64_t size, float* to) {
  sixteens(size, [&](int64_t k, auto lanes) { put(to + k, lanes, get(from, k, lanes)); });
}
inline void write(const float* from, int64_t size, Place to) {
  sixteens(size, [&](int64_t k, auto lanes) { to.put(k, lanes, get(from + k, lanes)); });
}

inline float add_up(f32x16 x) {
  float part[LANES];
  store(part, x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) part[i] += part[i + n];
  return part[0];
}

// A norm's weights, each null where it has none; `centred` norms take the mean off first.
struct Norm {
  Row scale{}, bias{};
  bool centred = false;
  float eps = 0;

  // Of `size` numbers, in place.
  void apply(float* x, int64_t size) const {
    auto mean = [&](const auto& of) {
      f32x16 sum{};
      sixteens(size, [&](int64_t k, auto lanes) { sum += of(get(x + k, lanes)); });
      return add_up(sum) / static_cast<float>(size);
    };
    if (centred) {
      float middle = mean([](f32x16 part) { return part; });
      sixteens(size, [&](int64_t k, auto lanes) { put(x + k, lanes, get(x + k, lanes) - middle); });
    }
    float inverse = 1.0f / std::sqrt(mean([](f32x16 part) { return part * part; }) + eps);
    sixteens(size, [&](int64_t k, auto lanes) {
      f32x16 part = get(x + k, lanes) * inverse;
      if (scale.at) part *= get(scale, k, lanes);
      if (bias.at) part += get(bias, k, lanes);
      put(x + k, lanes, part);
    });
  }
};

}  // namespace quire
