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

  // As many as a vector of the machine holds.
  F some(int64_t k) const {
    if (wide) return lanes<F>(static_cast<const float*>(at) + k);
    return widen(lanes<U16>(static_cast<const uint16_t*>(at) + k));
  }

  // What integers are to be multiplied with, and their sum.
  struct Integers {
    float scale;
    int32_t sum;
  };

  // The numbers from `from` to `to` as integers up to `most`, which the largest becomes: `put(k, integers)` gets a vector of
  // those from k on, or one, as unsigned bits. Where a number is not finite, neither is the scale.
  template <typename Put>
  Integers integers(int64_t from, int64_t to, float most, const Put& put) const {
    constexpr float ROUND = 12582912.0f;  // see `exp`
    constexpr uint32_t ZERO = 0x4b400000u;
    int64_t whole = from + (to - from) / W * W;
    F top{}, poison{};
    for (int64_t k = from; k < whole; k += W) {
      F v = some(k), size = (F)((U)v & 0x7fffffffu);
      top = size > top ? size : top;
      poison += v * 0.0f;
    }
    float largest = 0, spoilt = 0;
    for (int i = 0; i < W; ++i) largest = std::max(largest, top[i]), spoilt += poison[i];
    for (int64_t k = whole; k < to; ++k) largest = std::max(largest, std::fabs(one(k))), spoilt += one(k) * 0;
    float inverse = largest > most * 1e-38f ? most / largest : 0.0f;  // which is a number
    U sums{};
    for (int64_t k = from; k < whole; k += W) {
      U number = (U)(some(k) * inverse + ROUND) - ZERO;
      sums += number;
      put(k, number);
    }
    uint32_t sum = 0;
    for (int i = 0; i < W; ++i) sum += sums[i];
    for (int64_t k = whole; k < to; ++k) {
      float shifted = one(k) * inverse + ROUND;
      uint32_t bits;
      std::memcpy(&bits, &shifted, 4);
      sum += bits - ZERO;
      put(k, bits - ZERO);
    }
    return {largest / most + spoilt, static_cast<int32_t>(sum)};
  }

  // As bytes, each `bias` more than it stands for.
  Integers bytes(int64_t from, int64_t to, uint8_t* out, uint32_t bias) const {
    return integers(from, to, 127, [&](int64_t k, auto number) { put_bytes(out + k - from, number + bias); });
  }

  // As signed bytes, the high ones and the low ones.
  Integers two_bytes(int64_t from, int64_t to, float most, uint8_t* high, uint8_t* low) const {
    return integers(from, to, most, [&](int64_t k, auto number) {
      put_bytes(high + k - from, (number + 128) >> 8);
      put_bytes(low + k - from, number);
    });
  }

  static void put_bytes(uint8_t* out, U numbers) {
    U8 low = low_bytes(numbers);
    std::memcpy(out, &low, W);
  }
  static void put_bytes(uint8_t* out, uint32_t number) { *out = static_cast<uint8_t>(number); }
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
