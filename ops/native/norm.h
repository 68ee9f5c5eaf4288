// Norms of a row, as `quire.ops.norm` defines them. Sums are over sixteen numbers at a time, and then over those halves by
// halves: in the same order in any company.
#pragma once

#include <cmath>
#include <type_traits>

#include "row.h"

namespace quire {

// Calls take(k, lanes) for every sixteen of `size` numbers, where `lanes` is a constant, and for those that are left over.
template <typename Take>
void sixteens(int64_t size, const Take& take) {
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) take(k, std::integral_constant<int64_t, LANES>());
  if (k < size) take(k, size - k);
}

// Up to sixteen numbers of a row, zeros after them.
template <typename Lanes>
f32x16 some(const Row& row, int64_t k, Lanes lanes) {
  if (lanes == LANES) return row.sixteen(k);
  f32x16 x{};
  for (int64_t i = 0; i < lanes; ++i) x[i] = row.one(k + i);
  return x;
}
template <typename Lanes>
f32x16 some(const float* x, Lanes lanes) {
  f32x16 part{};
  std::memcpy(&part, x, lanes * sizeof(float));
  return part;
}
template <typename Lanes>
void keep(float* to, Lanes lanes, f32x16 x) {
  std::memcpy(to, &x, lanes * sizeof(float));
}

inline float add_up(f32x16 x) {
  float part[LANES];
  store(part, x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) part[i] += part[i + n];
  return part[0];
}

// Where a row of results goes, in either type.
struct Place {
  char* at;
  bool wide;

  Place(Buffer y, int64_t row) : wide(y.wide()) { at = y.data<char>() + row * (y.bytes() / y.dim(0)); }
  template <typename Lanes>
  void put(int64_t k, Lanes lanes, f32x16 x) const {
    float* floats = reinterpret_cast<float*>(at) + k;
    uint16_t* halves = reinterpret_cast<uint16_t*>(at) + k;
    if (lanes == LANES) return wide ? store(floats, x) : store_narrow(halves, x);
    for (int64_t i = 0; i < lanes; ++i)
      if (wide)
        floats[i] = x[i];
      else
        halves[i] = narrow(x[i]);
  }
};

// A norm's weights: a scale, or none, and a bias where it takes the mean off first, or none.
struct Norm {
  const Buffer *scale, *bias;
  bool centred;
  float eps;

  // Of `size` numbers, in place.
  void apply(float* x, int64_t size) const {
    auto mean = [&](const auto& of) {
      f32x16 sum{};
      sixteens(size, [&](int64_t k, auto lanes) { sum += of(some(x + k, lanes)); });
      return add_up(sum) / static_cast<float>(size);
    };
    if (centred) {
      float middle = mean([](f32x16 part) { return part; });
      sixteens(size, [&](int64_t k, auto lanes) { keep(x + k, lanes, some(x + k, lanes) - middle); });
    }
    float inverse = 1.0f / std::sqrt(mean([](f32x16 part) { return part * part; }) + eps);
    sixteens(size, [&](int64_t k, auto lanes) {
      f32x16 part = some(x + k, lanes) * inverse;
      if (scale) part *= some(Row(*scale, 0), k, lanes);
      if (bias) part += some(Row(*bias, 0), k, lanes);
      keep(x + k, lanes, part);
    });
  }
};

}  // namespace quire
