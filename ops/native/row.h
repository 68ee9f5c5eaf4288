// Rows of bfloat16 or float32 values: reading, writing and quantising them.
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "common.h"
#include "threads.h"

namespace quire {

// Calls run(row) for T rows of K values, in chunks of at least about 32 Ki values that threads share.
template <typename Pool, typename Run>
void for_each_row(Pool& pool, int64_t T, int64_t K, const Run& run) {
  int64_t chunk_rows = std::max<int64_t>(1, (32 << 10) / K);
  parallel(pool, (T + chunk_rows - 1) / chunk_rows, [&](int64_t chunk) {
    for (int64_t row = chunk * chunk_rows; row < std::min(T, (chunk + 1) * chunk_rows); ++row) run(row);
  });
}

// A row of an input array, read as float32.
struct Row {
  const void* data;
  bool is_float32;  // else bfloat16

  f32x16 load16(int64_t k) const {
    return is_float32 ? load(static_cast<const float*>(data) + k) : load_bf16(static_cast<const uint16_t*>(data) + k);
  }
  float load_one(int64_t k) const {
    return is_float32 ? static_cast<const float*>(data)[k] : bf16_to_float(static_cast<const uint16_t*>(data)[k]);
  }

  // One machine vector.
  F load_vector(int64_t k) const {
    if (is_float32) return load_as<F>(static_cast<const float*>(data) + k);
    return bf16_to_float(load_as<U16>(static_cast<const uint16_t*>(data) + k));
  }

  struct Quantised {
    float scale;
    int32_t sum;  // of the integers
  };

  // Quantises the values from `begin` to `end` to integers of at most `max_code`, which stands for the largest
  // magnitude. Calls put(k, codes) with a vector of integers, the first of index k, or with a single one, as unsigned
  // bits. If a value is not finite, the scale is not finite either.
  template <typename Put>
  Quantised quantise(int64_t begin, int64_t end, float max_code, const Put& put) const {
    constexpr float ROUND_BIAS = 12582912.0f;  // see `exp`
    constexpr uint32_t ROUND_BIAS_BITS = 0x4b400000u;
    int64_t vector_end = begin + (end - begin) / W * W;
    F max_abs_lanes{}, nan_check_lanes{};
    for (int64_t k = begin; k < vector_end; k += W) {
      F v = load_vector(k), magnitude = (F)((U)v & 0x7fffffffu);
      max_abs_lanes = magnitude > max_abs_lanes ? magnitude : max_abs_lanes;
      nan_check_lanes += v * 0.0f;
    }
    float max_abs = 0;
    float nan_check = 0;  // NaN if a value is not finite
    for (int i = 0; i < W; ++i) max_abs = std::max(max_abs, max_abs_lanes[i]), nan_check += nan_check_lanes[i];
    for (int64_t k = vector_end; k < end; ++k)
      max_abs = std::max(max_abs, std::fabs(load_one(k))), nan_check += load_one(k) * 0;
    float inverse = max_abs > max_code * 1e-38f ? max_code / max_abs : 0.0f;  // always finite
    U sum_lanes{};
    for (int64_t k = begin; k < vector_end; k += W) {
      U codes = (U)(load_vector(k) * inverse + ROUND_BIAS) - ROUND_BIAS_BITS;
      sum_lanes += codes;
      put(k, codes);
    }
    uint32_t sum = 0;
    for (int i = 0; i < W; ++i) sum += sum_lanes[i];
    for (int64_t k = vector_end; k < end; ++k) {
      float biased = load_one(k) * inverse + ROUND_BIAS;
      uint32_t bits;
      std::memcpy(&bits, &biased, 4);
      sum += bits - ROUND_BIAS_BITS;
      put(k, bits - ROUND_BIAS_BITS);
    }
    return {max_abs / max_code + nan_check, static_cast<int32_t>(sum)};
  }

  // Quantises to int8, and stores each integer plus `offset`.
  Quantised quantise_int8(int64_t begin, int64_t end, uint8_t* out, uint32_t offset) const {
    return quantise(begin, end, 127, [&](int64_t k, auto codes) { put_bytes(out + k - begin, codes + offset); });
  }

  // Quantises to int16, stored as high and low signed bytes: high * 256 + low.
  Quantised quantise_int16(int64_t begin, int64_t end, float max_code, uint8_t* high, uint8_t* low) const {
    return quantise(begin, end, max_code, [&](int64_t k, auto codes) {
      put_bytes(high + k - begin, (codes + 128) >> 8);
      put_bytes(low + k - begin, codes);
    });
  }

  static void put_bytes(uint8_t* out, U codes) {
    U8 low = low_bytes(codes);
    std::memcpy(out, &low, W);
  }
  static void put_bytes(uint8_t* out, uint32_t code) { *out = static_cast<uint8_t>(code); }
};

// A row of an output array.
struct OutputRow {
  void* data;
  bool is_float32;  // else bfloat16

  // Stores the first `count` of sixteen values, from index `k` on.
  template <typename Count>
  void store_at(int64_t k, Count count, f32x16 values) const {
    float* floats = static_cast<float*>(data) + k;
    uint16_t* halves = static_cast<uint16_t*>(data) + k;
    if (count == LANES) return is_float32 ? store(floats, values) : store_bf16(halves, values);
    for (int64_t i = 0; i < count; ++i)
      if (is_float32)
        floats[i] = values[i];
      else
        halves[i] = float_to_bf16(values[i]);
  }
};

}  // namespace quire
