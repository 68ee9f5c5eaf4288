// AMX instructions, which compute tiles of sixteen by sixteen sums. With QUIRE_EMULATE_AMX they are plain loops, so
// that the code around them is tested on machines without AMX.
#pragma once

#include "common.h"

#if !defined(QUIRE_FLOAT_ROWS) && (defined(__AMX_BF16__) || defined(QUIRE_EMULATE_AMX))
#define QUIRE_AMX 1

namespace quire {
namespace amx {

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 blocks of weights. The two tiles of x have this many rows each.
inline Config config(int64_t first_rows, int64_t second_rows) {
  Config c;
  for (int tile = 0; tile < 8; ++tile) {
    c.row_bytes[tile] = 64;
    int64_t x_tile = tile < 4 ? tile / 2 : tile - 4;
    c.rows[tile] = static_cast<uint8_t>(tile < 6 ? (x_tile ? second_rows : first_rows) : 16);
  }
  return c;
}

#if defined(QUIRE_EMULATE_AMX)

struct State {
  Config config;
  uint8_t bytes[8][16][64];
};

inline State& state() {
  static thread_local State s;
  return s;
}

inline void start(const Config& c) {
  state().config = c;
  std::memset(state().bytes, 0, sizeof(state().bytes));
}
inline void stop() {}

template <int N>
void zero() {
  std::memset(state().bytes[N], 0, 1024);
}
template <int N>
void load(const void* source, int64_t stride) {
  zero<N>();
  for (int r = 0; r < state().config.rows[N]; ++r)
    std::memcpy(state().bytes[N][r], static_cast<const uint8_t*>(source) + r * stride, 64);
}
template <int N>
void store(void* target, int64_t stride) {
  for (int r = 0; r < state().config.rows[N]; ++r)
    std::memcpy(static_cast<uint8_t*>(target) + r * stride, state().bytes[N][r], 64);
}
template <int C, int A, int B>
void dot_bf16() {
  auto& t = state().bytes;
  for (int m = 0; m < state().config.rows[C]; ++m)
    for (int n = 0; n < 16; ++n) {
      float sum, even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        uint16_t a[2], b[2];
        std::memcpy(a, t[A][m] + 4 * k, 4);
        std::memcpy(b, t[B][k] + 4 * n, 4);
        even += bf16_to_float(a[0]) * bf16_to_float(b[0]);
        odd += bf16_to_float(a[1]) * bf16_to_float(b[1]);
      }
      std::memcpy(&sum, t[C][m] + 4 * n, 4);
      sum += even + odd;
      std::memcpy(t[C][m] + 4 * n, &sum, 4);
    }
}
template <int C, int A, int B>
void dot_int8() {
  auto& t = state().bytes;
  for (int m = 0; m < state().config.rows[C]; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      std::memcpy(&sum, t[C][m] + 4 * n, 4);
      for (int k = 0; k < 64; ++k)
        sum += static_cast<int8_t>(t[A][m][k]) * static_cast<int8_t>(t[B][k / 4][4 * n + k % 4]);
      std::memcpy(t[C][m] + 4 * n, &sum, 4);
    }
}

#else

// GCC 12 assumes that ldtilecfg reads only eight bytes: the memory clobber keeps it from removing stores to the others.
inline void start(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
inline void stop() { asm volatile("tilerelease" ::: "memory"); }

template <int N>
void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}
template <int N>
void load(const void* source, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(source), "r"(stride), "i"(N) : "memory");
}
template <int N>
void store(void* target, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(target), "r"(stride), "i"(N) : "memory");
}
template <int C, int A, int B>
void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
void dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace amx
}  // namespace quire

#endif
