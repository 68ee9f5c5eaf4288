// Norms of a row, as `quire.ops.norm` defines them. Sums are over sixteen numbers at a time, and then over those halves by
// halves: in the same order in any company.
#pragma once

#include <cmath>

#include "row.h"

namespace quire {

// Calls take(k, lanes) for every sixteen of `size` numbers, and for those that are left over.
template <typename Take>
void sixteens(int64_t size, const Take& take) {
  for (int64_t k = 0; k < size; k += LANES) take(k, std::min<int64_t>(LANES, size - k));
}

// Some numbers of a row, zeros after them.
inline f32x16 some(const Row& row, int64_t k, int64_t lanes) {
  if (lanes == LANES) return row.sixteen(k);
  f32x16 x{};
  for (int64_t i = 0; i < lanes; ++i) x[i] = row.one(k + i);
  return x;
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

  Place(Buffer y, int64_t row, int64_t from = 0) : wide(y.wide()) {
    at = y.data<char>() + (row * y.size() / y.dim(0) + from) * (wide ? 4 : 2);
  }
  void put(int64_t k, int64_t lanes, f32x16 x) const {
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

  // Of `size` numbers, in place. The weights of the first of them are at `from`.
  void apply(float* x, int64_t size, int64_t from = 0) const {
    auto mean = [&](const auto& of) {
      f32x16 sum{};
      sixteens(size, [&](int64_t k, int64_t lanes) {
        f32x16 part{};
        std::memcpy(&part, x + k, lanes * sizeof(float));
        sum += of(part);
      });
      return add_up(sum) / static_cast<float>(size);
    };
    if (centred) {
      float middle = mean([](f32x16 part) { return part; });
      for (int64_t k = 0; k < size; ++k) x[k] -= middle;
    }
    float inverse = 1.0f / std::sqrt(mean([](f32x16 part) { return part * part; }) + eps);
    sixteens(size, [&](int64_t k, int64_t lanes) {
      f32x16 part{};
      std::memcpy(&part, x + k, lanes * sizeof(float));
      part *= inverse;
      if (scale) part *= some(Row(*scale, 0), from + k, lanes);
      if (bias) part += some(Row(*bias, 0), from + k, lanes);
      std::memcpy(x + k, &part, lanes * sizeof(float));
    });
  }
};

}  // namespace quire
