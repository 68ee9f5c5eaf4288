// Normalisation of a row, as `quire.ops.norm` defines it. Sums add sixteen lanes at a time and then fold them by
// halves, always in this order: batch-invariant.
#pragma once

#include "row.h"

namespace quire {

// Calls run(k, count) for every sixteen of `size` values, with a compile-time count, and for the remainder.
template <typename Run>
void for_each_16(int64_t size, const Run& run) {
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) run(k, std::integral_constant<int64_t, LANES>());
  if (k < size) run(k, size - k);
}

// Loads `count` of sixteen values; the others are zeros.
template <typename Count>
f32x16 load_partial(const float* x, Count count) {
  if (count == LANES) return load(x);
  float values[LANES] = {};
  std::memcpy(values, x, count * sizeof(float));
  return load(values);
}
template <typename Count>
f32x16 load_partial(Row row, int64_t k, Count count) {
  if (count == LANES) return row.load16(k);
  float values[LANES] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = row.load_one(k + i);
  return load(values);
}
// Stores the first `count` of sixteen values.
template <typename Count>
void store_partial(float* x, Count count, f32x16 values) {
  if (count == LANES) return store(x, values);
  float array[LANES];
  store(array, values);
  std::memcpy(x, array, count * sizeof(float));
}

inline void read_row(Row row, int64_t size, float* out) {
  for_each_16(size, [&](int64_t k, auto count) { store_partial(out + k, count, load_partial(row, k, count)); });
}
inline void write_row(const float* x, int64_t size, OutputRow row) {
  for_each_16(size, [&](int64_t k, auto count) { row.store_at(k, count, load_partial(x + k, count)); });
}

inline float sum_lanes(f32x16 x) {
  float array[LANES];
  store(array, x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) array[i] += array[i + n];
  return array[0];
}

// RMS norm, or layer norm where `centred`. Scale and bias are null if there are none.
struct Norm {
  Row scale{}, bias{};
  bool centred = false;  // whether the mean is subtracted first
  float eps = 0;

  // Normalises `size` values in place.
  void apply(float* x, int64_t size) const {
    auto mean_of = [&](const auto& term) {
      f32x16 sum{};
      for_each_16(size, [&](int64_t k, auto count) { sum += term(load_partial(x + k, count)); });
      return sum_lanes(sum) / static_cast<float>(size);
    };
    if (centred) {
      float mean = mean_of([](f32x16 values) { return values; });
      for_each_16(size, [&](int64_t k, auto count) { store_partial(x + k, count, load_partial(x + k, count) - mean); });
    }
    float inverse = 1.0f / std::sqrt(mean_of([](f32x16 values) { return values * values; }) + eps);
    for_each_16(size, [&](int64_t k, auto count) {
      f32x16 values = load_partial(x + k, count) * inverse;
      if (scale.data) values *= load_partial(scale, k, count);
      if (bias.data) values += load_partial(bias, k, count);
      store_partial(x + k, count, values);
    });
  }
};

}  // namespace quire
