// AMX: sixteen by sixteen sums at a time. With QUIRE_EMULATE_AMX the instructions are plain loops, so that everything
// round them is tested on machines that lack them.
#pragma once

#include "common.h"

#if !defined(QUIRE_FLOAT_ROWS) && (defined(__AMX_BF16__) || defined(QUIRE_EMULATE_AMX))
#define QUIRE_AMX 1

namespace quire {
namespace amx {

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a tile's row
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 blocks of weights; the last of two tiles of x may be shorter.
inline Config config(int64_t first, int64_t second) {
  Config c;
  for (int tile = 0; tile < 8; ++tile) {
    c.bytes[tile] = 64;
    int64_t of_rows = tile < 4 ? tile / 2 : tile - 4;
    c.rows[tile] = static_cast<uint8_t>(tile < 6 ? (of_rows ? second : first) : 16);
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
void load(const void* from, int64_t stride) {
  zero<N>();
  for (int r = 0; r < state().config.rows[N]; ++r)
    std::memcpy(state().bytes[N][r], static_cast<const uint8_t*>(from) + r * stride, 64);
}
template <int N>
void store(void* to, int64_t stride) {
  for (int r = 0; r < state().config.rows[N]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, state().bytes[N][r], 64);
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
        even += widen(a[0]) * widen(b[0]);
        odd += widen(a[1]) * widen(b[1]);
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

// GCC 12 believes that ldtilecfg reads eight bytes alone: the whole of memory is named, lest stores to the rest be dropped.
inline void start(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
inline void stop() { asm volatile("tilerelease" ::: "memory"); }

template <int N>
void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}
template <int N>
void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(N) : "memory");
}
template <int N>
void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(N) : "memory");
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
