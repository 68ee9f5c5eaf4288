// Rows of bfloat16 or float32.
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>

#include "common.h"
#include "threads.h"

namespace quire {

// Work on every row, spread over the threads where there is enough of it.
template <typename Pool, typename Run>
void each_row(Pool& pool, int64_t T, int64_t K, const Run& run) {
  int64_t rows = std::max<int64_t>(1, (32 << 10) / K);
  parallel(pool, (T + rows - 1) / rows, [&](int64_t chunk) {
    for (int64_t row = chunk * rows; row < std::min(T, (chunk + 1) * rows); ++row) run(row);
  });
}

// A row in float32, from either type.
struct Row {
  const void* at;
  bool wide;  // float32

  f32x16 sixteen(int64_t k) const {
    return wide ? load(static_cast<const float*>(at) + k) : load_wide(static_cast<const uint16_t*>(at) + k);
  }
  float one(int64_t k) const {
    return wide ? static_cast<const float*>(at)[k] : widen(static_cast<const uint16_t*>(at)[k]);
  }

  // The numbers from `from` to `to` as bytes, and what to multiply those with: the largest becomes 127. Where one is not
  // finite, neither is that.
  float bytes(int64_t from, int64_t to, uint8_t* out, uint32_t bias) const {
    constexpr float ROUND = 12582912.0f;  // see `exp`
    constexpr uint32_t ZERO = 0x4b400000u;
    int64_t whole = from + (to - from) / LANES * LANES;
    f32x16 most{}, poison{};
    for (int64_t k = from; k < whole; k += LANES) {
      f32x16 v = sixteen(k), size = (f32x16)((u32x16)v & 0x7fffffffu);
      most = size > most ? size : most;
      poison += v * 0.0f;
    }
    float largest = 0, spoilt = 0;
    for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]), spoilt += poison[i];
    for (int64_t k = whole; k < to; ++k) largest = std::max(largest, std::fabs(one(k))), spoilt += one(k) * 0;
    float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;  // which is a number
    for (int64_t k = from; k < whole; k += LANES) {
      u8x16 bytes = __builtin_convertvector((u32x16)(sixteen(k) * inverse + ROUND) - ZERO + bias, u8x16);
      std::memcpy(out + k - from, &bytes, LANES);
    }
    for (int64_t k = whole; k < to; ++k) {
      float shifted = one(k) * inverse + ROUND;
      uint32_t bits;
      std::memcpy(&bits, &shifted, 4);
      out[k - from] = static_cast<uint8_t>(bits - ZERO + bias);
    }
    return largest / 127.0f + spoilt;
  }
};

// Where a row of results goes.
struct Place {
  void* at;
  bool wide;  // float32

  // Up to sixteen numbers from `k` on.
  template <typename Lanes>
  void put(int64_t k, Lanes lanes, f32x16 part) const {
    float* floats = static_cast<float*>(at) + k;
    uint16_t* halves = static_cast<uint16_t*>(at) + k;
    if (lanes == LANES) return wide ? store(floats, part) : store_narrow(halves, part);
    for (int64_t i = 0; i < lanes; ++i)
      if (wide)
        floats[i] = part[i];
      else
        halves[i] = narrow(part[i]);
  }
};

}  // namespace quire
