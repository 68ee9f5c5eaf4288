// The arithmetic of paged attention: keys turned, scores, weights, values mixed, for one block of keys at a time.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "common.h"

namespace quire {
namespace attention {

// How many rows times how many vectors of sums stay in the machine's registers: in 24 of 32, or in 12 of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 6;
#else
constexpr int ROWS = 3;
#endif
constexpr int COLS = 4;

constexpr int64_t BLOCK = 64, GROUPS = BLOCK / W;
constexpr float LOG2E = 1.44269504f, NONE = -std::numeric_limits<float>::infinity();

typedef float Fu __attribute__((vector_size(4 * W), aligned(4)));
typedef uint32_t U4 __attribute__((vector_size(16)));

inline F load(const float* p) { return *reinterpret_cast<const Fu*>(p); }
inline void store(float* p, F x) { *reinterpret_cast<Fu*>(p) = x; }
inline F splat(float x) { return F{} + x; }

// 2 to the x, for x of at most 0 or a rounding more, within one unit in the last place; 0 below -126.
inline F power(F x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  F y = x > -126.0f ? x : splat(-126.0f);
  F shifted = y + round;
  F f = y - (shifted - round);
  F p = f * 1.5353362e-4f + 1.3398875e-3f;
  p = p * f + 9.6184369e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  p = (F)((U)p + ((U)shifted << 23));
  return x < -126.0f ? F{} : p;
}
inline float power(float x) { return power(splat(x))[0]; }

inline F tanh(F x) {
  F e = power((x < 0.0f ? x : -x) * (2 * LOG2E));
  F y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

// Halves onto halves, down to one.
template <typename Fold>
float fold(F x, const Fold& with) {
  float part[W];
  store(part, x);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) part[i] = with(part[i], part[i + n]);
  return part[0];
}
inline float sum(F x) {
  return fold(x, [](float a, float b) { return a + b; });
}
inline float highest(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return fold(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

// Two codes of four bits, each plus 8: the first in the low ones.
struct Pair {
  uint8_t codes;
};

// Dimensions of an element of pages.
template <typename Page>
constexpr int64_t EACH = std::is_same_v<Page, Pair> ? 2 : 1;

// What the lowest four bits of each lane stand for.
inline F number(U codes) {
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)codes, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
#else
  return (F)((codes & 15u) | 0x4b000000u) - 8388616.0f;  // they are the last bits of 2^23 and so many
#endif
}

// Where a dimension's query lies among eight: codes become pairs of bfloat16 four places apart.
template <typename X>
constexpr int64_t place_of(int64_t dimension) {
  if (sizeof(X) == 4) return dimension;
  return dimension / 8 * 8 + dimension % 4 * 2 + dimension / 4 % 2;
}

// The bfloat16 that a float begins with.
inline uint16_t upper(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

template <typename To, typename From>
To convert(From x) {
  if constexpr (std::is_same_v<To, From>)
    return x;
  else if constexpr (std::is_same_v<From, uint16_t>)
    return bf16_to_float(x);
  else if constexpr (std::is_same_v<To, uint16_t> && std::is_same_v<From, int8_t>)
    return upper(static_cast<float>(x));
  else if constexpr (std::is_same_v<To, uint16_t>)
    return float_to_bf16(x);
  else
    return static_cast<To>(x);
}

// Four rows of words turned into columns; where a vector has several parts of four, in each by itself.
#if defined(__AVX512F__)
typedef uint32_t Turned __attribute__((vector_size(64)));
inline Turned join(const U4* x) {
  __m512i all = _mm512_castsi128_si512((__m128i)x[0]);
  all = _mm512_inserti32x4(all, (__m128i)x[1], 1);
  all = _mm512_inserti32x4(all, (__m128i)x[2], 2);
  return (Turned)_mm512_inserti32x4(all, (__m128i)x[3], 3);
}
inline Turned low(Turned a, Turned b) { return (Turned)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
inline Turned high(Turned a, Turned b) { return (Turned)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
inline Turned low_two(Turned a, Turned b) { return (Turned)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline Turned high_two(Turned a, Turned b) { return (Turned)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
typedef uint32_t Turned __attribute__((vector_size(32)));
inline Turned join(const U4* x) {
  return (Turned)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)x[0]), (__m128i)x[1], 1);
}
inline Turned low(Turned a, Turned b) { return (Turned)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
inline Turned high(Turned a, Turned b) { return (Turned)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
inline Turned low_two(Turned a, Turned b) { return (Turned)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline Turned high_two(Turned a, Turned b) { return (Turned)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
typedef U4 Turned;
inline Turned join(const U4* x) { return x[0]; }
inline Turned low(Turned a, Turned b) { return Turned{a[0], b[0], a[1], b[1]}; }
inline Turned high(Turned a, Turned b) { return Turned{a[2], b[2], a[3], b[3]}; }
inline Turned low_two(Turned a, Turned b) { return Turned{a[0], a[1], b[0], b[1]}; }
inline Turned high_two(Turned a, Turned b) { return Turned{a[2], a[3], b[2], b[3]}; }
#endif
constexpr int TURN = sizeof(Turned) / 4;

// The keys of a block that some row of the tile sees, lo..hi, and the slots where they lie.
struct Block {
  int64_t base;
  int lo, hi;
  int64_t slot[BLOCK], scale[BLOCK];  // and where the first head's scales lie

  int first() const { return lo / W; }
  int stop() const { return (hi + W - 1) / W; }
};

// Fetches the next block's keys and values while this one is computed: evenly, so that memory never waits, and in the
// order in which they lie, all heads of a position together, for memory that is jumped through is half as fast.
class Ahead {
 public:
  explicit Ahead(int64_t bytes) : bytes(bytes) {}  // so many from each place that is added
  void add(const void* row) { *last++ = static_cast<const char*>(row); }
  void fetch() {
    for (int i = 0; i < 2; ++i, at += 64) {
      if (at >= end) {
        at = next < last ? *next++ : reinterpret_cast<const char*>(this);
        end = at + bytes;
      }
      __builtin_prefetch(at, 0, 2);
    }
  }
  void fetch_rest() {
    while (next < last) fetch();
  }

 private:
  const char *start[2 * BLOCK], **next = start, **last = start, *at = nullptr, *end = nullptr;
  int64_t bytes;
};

// W keys of H dimensions, turned: [word][W keys], where a word is a float or a pair of bfloat16.
template <typename X>
void turn(const X* const* key, int64_t H, uint32_t* to, Ahead& ahead) {
  constexpr int64_t STEP = 16 / sizeof(X);
  for (int j = 0; j < W; j += TURN)
    for (int64_t h = 0; h < H; h += STEP) {
      ahead.fetch();
      Turned x[4];
      for (int i = 0; i < 4; ++i) {
        U4 part[TURN / 4];
        for (int k = 0; k < TURN / 4; ++k) std::memcpy(part + k, key[j + 4 * k + i] + h, 16);
        x[i] = join(part);
      }
      Turned a = low(x[0], x[1]), b = high(x[0], x[1]), c = low(x[2], x[3]), d = high(x[2], x[3]);
      Turned y[4] = {low_two(a, c), high_two(a, c), low_two(b, d), high_two(b, d)};
      for (int i = 0; i < 4; ++i) std::memcpy(to + (h / STEP * 4 + i) * W + j, y + i, sizeof(Turned));
    }
}

// Words of eight codes into words of X, for W keys.
template <typename X>
void widen_codes(const uint32_t* codes, int64_t words, uint32_t* to) {
#if defined(__AVX512BF16__)
  // bfloat16 of -8 to 7, twice: the lookup sees five bits, of which the fifth is the next code's.
  __m256i once = _mm256_setr_epi16(0xc100 - 0x10000, 0xc0e0 - 0x10000, 0xc0c0 - 0x10000, 0xc0a0 - 0x10000, 0xc080 - 0x10000,
                                   0xc040 - 0x10000, 0xc000 - 0x10000, 0xbf80 - 0x10000, 0, 0x3f80, 0x4000, 0x4040, 0x4080,
                                   0x40a0, 0x40c0, 0x40e0);
  __m512i table = _mm512_broadcast_i64x4(once);
#endif
  for (int64_t i = 0; i < words; ++i) {
    U eight = lanes<U>(codes + i * W);
    for (int n = 0; n < (sizeof(X) == 4 ? 8 : 4); ++n, eight >>= 4, to += W) {
      if constexpr (sizeof(X) == 4) {
        F one = number(eight);
        std::memcpy(to, &one, sizeof(F));
      } else {
#if defined(__AVX512BF16__)
        U pairs = (U)_mm512_permutexvar_epi16((__m512i)eight, table);
#else
        U pairs = (U)number(eight) >> 16 | ((U)number(eight >> 16) & 0xffff0000u);
#endif
        std::memcpy(to, &pairs, sizeof(U));
      }
    }
  }
}

// How queries lie where words are X: those of pairs as pairs if the machine multiplies them as such, else as floats.
#if defined(QUIRE_BF16_PAIRS)
template <typename X>
using Query = X;
#else
template <typename X>
using Query = float;
#endif

// sums + the products of W words and the query's h-th dimensions.
template <typename X>
F dot(F sums, U words, const Query<X>* q) {
  if constexpr (sizeof(X) == 4) {
    return sums + (F)words * q[0];
  } else {
#if defined(__AVX512BF16__)
    int32_t pair;
    std::memcpy(&pair, q, 4);
    return (F)_mm512_dpbf16_ps((__m512)sums, (__m512bh)words, (__m512bh)_mm512_set1_epi32(pair));
#elif defined(QUIRE_BF16_PAIRS)
    return dot_bf16_pair(sums, words, q);
#else
    sums += (F)(words << 16) * q[0];
    return sums + (F)(words & 0xffff0000u) * q[1];
#endif
  }
}

// The scores of R rows and N groups of keys.
template <typename X, int R, int N>
void dots(const Query<X>* q, const uint32_t* keys, int64_t H, float* s, Ahead& ahead) {
  constexpr int64_t STEP = 4 / sizeof(X);
  F sums[R][N] = {};
  for (int64_t h = 0; h < H; h += STEP) {
    ahead.fetch();
    for (int n = 0; n < N; ++n) {
      U words = lanes<U>(keys + (n * H + h) / STEP * W);
      for (int r = 0; r < R; ++r) sums[r][n] = dot<X>(sums[r][n], words, q + r * H + h);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(s + r * BLOCK + n * W, sums[r][n]);
}

// Whether weights are rounded to bfloat16, for the machine multiplies pairs of them with the values of two keys.
template <typename X>
constexpr bool PAIRS = std::is_same_v<Query<X>, uint16_t>;

// Whether keys of pairs are made floats where many rows meet them: the machine does not multiply pairs, and making floats of
// them again for every few rows takes as long as multiplying them.
template <typename X>
constexpr bool UNPAIRS = sizeof(X) == 2 && !PAIRS<X>;

// `words` vectors of pairs as floats: the first of each pair, then the second.
inline void unpair(const uint32_t* from, int64_t words, float* to) {
  for (int64_t i = 0; i < words; ++i) {
    U pairs = lanes<U>(from + i * W);
    store(to + 2 * i * W, (F)(pairs << 16));
    store(to + (2 * i + 1) * W, (F)(pairs & 0xffff0000u));
  }
}

// Calls run(row, count) for all rows, as many at a time as registers hold and each time about as many; count is a
// constant of 1 to ROWS.
template <typename Run, int R = ROWS>
void some_rows(int64_t row, int64_t count, const Run& run) {
  if (count == R)
    run(row, std::integral_constant<int, R>());
  else if constexpr (R > 1)
    some_rows<Run, R - 1>(row, count, run);
}
template <typename Run>
void each_rows(int64_t row, int64_t stop, const Run& run) {
  int64_t groups = (stop - row + ROWS - 1) / ROWS;
  for (; groups; --groups) {
    int64_t count = (stop - row + groups - 1) / groups;
    some_rows(row, count, run);
    row += count;
  }
}

// Values come UNIT dimensions at a time. Of bfloat16 and pairs the even come first and then the odd, for that costs
// nothing.
template <typename X>
constexpr int UNIT = sizeof(X) == 2 || EACH<X> == 2 ? 2 * W : W;

inline void load_values(const float* p, F* v) { v[0] = load(p); }
inline void load_values(const int8_t* p, F* v) { v[0] = load_bytes(p); }
inline void load_values(const uint16_t* p, F* v) {
  U pairs = lanes<U>(p);
  v[0] = (F)(pairs << 16), v[1] = (F)(pairs & 0xffff0000u);
}
inline void load_values(const Pair* p, F* v) {
#if defined(__AVX512F__)  // GCC converts such a vector one by one
  U pairs = (U)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  U pairs = (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  U pairs = __builtin_convertvector(lanes<U8>(p), U);
#endif
  v[0] = number(pairs), v[1] = number(pairs >> 4);
}

// The values of two keys as pairs of bfloat16, which hold those of pages exactly; or such pairs, made before.
template <typename X>
void load_pairs(const X* first, const X* second, U* pairs) {
  F v[2][UNIT<X> / W];
  load_values(first, v[0]), load_values(second, v[1]);
  for (int i = 0; i < UNIT<X> / W; ++i) pairs[i] = (U)v[0][i] >> 16 | ((U)v[1][i] & 0xffff0000u);
}
inline void load_pairs(const uint32_t* made, const uint32_t*, U* pairs) { pairs[0] = lanes<U>(made); }

// UNIT<X> results, lying as load_values of X brought them, to `n` of type Y in their own order.
template <typename X, typename Y>
void store_results(Y* to, const F* v, int64_t n) {
  if constexpr (UNIT<X> == 2 * W && sizeof(Y) == 2) {
    U bits[2];
    for (int i = 0; i < 2; ++i) {
      U x = (U)v[i], nan = (x & 0x7fffffffu) > 0x7f800000u;
      bits[i] = nan ? x | 0x400000u : x + 0x7fffu + ((x >> 16) & 1u);
    }
    U words = bits[0] >> 16 | (bits[1] & 0xffff0000u);
    std::memcpy(to, &words, n * sizeof(Y));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = convert<Y>(v[i % (UNIT<X> / W)][i / (UNIT<X> / W)]);
  }
}

// Weights to where values meet them, as floats or rounded.
inline void store_weights(float* row, int at, F weights) { store(row + at, weights); }
inline void store_weights(uint16_t* row, int at, F weights) {
#if defined(__AVX512BF16__)
  U16 rounded = (U16)_mm512_cvtneps_pbh((__m512)weights);
#else
  U16 rounded = float_to_bf16(weights);
#endif
  std::memcpy(row + at, &rounded, sizeof(rounded));
}

// out += weights x values, for R rows, N vectors and the keys lo..hi. Those of pairs come two at a time, from an even one on.
template <typename X, int R, int N>
void mix(const uint16_t* s, const X* const* value, int64_t at, int lo, int hi, float* out, int64_t V, Ahead& ahead) {
  F sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = load(out + r * V + n * W);
  for (int j = lo; j < hi; j += 2) {
    ahead.fetch(), ahead.fetch();
    U pairs[N];
    for (int n = 0; n < N; n += UNIT<X> / W) {
      int64_t from = (at + n * W) / EACH<X>;
      load_pairs(value[j] + from, value[j + 1] + from, pairs + n);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][n] = dot<uint16_t>(sums[r][n], pairs[n], s + r * BLOCK + j);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * V + n * W, sums[r][n]);
}
template <typename X, int R, int N>
void mix(const float* s, const X* const* value, int64_t at, int lo, int hi, float* out, int64_t V, Ahead& ahead) {
  F sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = load(out + r * V + n * W);
  for (int j = lo; j < hi; ++j) {
    ahead.fetch();
    if constexpr (ROWS < 6) {  // few registers: the rows' weights stay in some, and values come and go
      F weight[R];
      for (int r = 0; r < R; ++r) weight[r] = s[r * BLOCK + j] - F{};
      for (int n = 0; n < N; n += UNIT<X> / W) {
        F v[UNIT<X> / W];
        load_values(value[j] + (at + n * W) / EACH<X>, v);
        for (int i = 0; i < UNIT<X> / W; ++i)
          for (int r = 0; r < R; ++r) sums[r][n + i] += v[i] * weight[r];
      }
    } else {
      F v[N];
      for (int n = 0; n < N; n += UNIT<X> / W) load_values(value[j] + (at + n * W) / EACH<X>, v + n);
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sums[r][n] += v[n] * s[r * BLOCK + j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * V + n * W, sums[r][n]);
}

// The vectors are a multiple of STEP.
template <int R, int STEP, int N = COLS, typename Weight, typename X>
void mix_any(int64_t vectors, const Weight* s, const X* const* value, int64_t at, int lo, int hi, float* out, int64_t V,
             Ahead& ahead) {
  if (vectors == N)
    mix<X, R, N>(s, value, at, lo, hi, out, V, ahead);
  else if constexpr (N > STEP)
    mix_any<R, STEP, N - STEP>(vectors, s, value, at, lo, hi, out, V, ahead);
}

// The state of a softmax: the weighted values [R, V], and of each row the best score and the sum of weights.
struct Sums {
  float *out, *best, *total;

  static int64_t size(int64_t R, int64_t V) { return R * V + (2 * R + W - 1) / W * W; }
  Sums(float* at, int64_t R, int64_t V) : out(at), best(at + R * V), total(best + R) {}

  void clear(int64_t R, int64_t V) {
    std::fill_n(out, R * V, 0.0f);
    std::fill_n(best, R, NONE);
    std::fill_n(total, R, 0.0f);
  }
};

// This and the next two are never inlined: what the compiler contracts in one place it shall contract in all.
__attribute__((noinline)) inline void merge(Sums to, Sums from, int64_t R, int64_t V) {
  for (int64_t r = 0; r < R; ++r) {
    float best = std::max(to.best[r], from.best[r]);
    if (best == NONE) continue;
    float old = power(to.best[r] - best), fresh = power(from.best[r] - best);
    to.best[r] = best;
    to.total[r] = to.total[r] * old + from.total[r] * fresh;
    float *x = to.out + r * V, *y = from.out + r * V;
    for (int64_t i = 0; i < V; i += W) store(x + i, load(x + i) * old + load(y + i) * fresh);
  }
}

struct Scoring {
  float scale, soft_cap;  // no cap: 0
  int64_t window;         // none: more than any position
  bool chunked = false;   // of the window, rows see what comes after the last multiple of it
  int64_t ahead = 0;      // so many positions after its own a row sees too, as far as its sequence goes

  float unit() const { return (soft_cap ? soft_cap : scale) * LOG2E; }
  // The last position before those that a row sees.
  int64_t hidden(int64_t position) const {
    return chunked ? position - position % window - 1 : position - window;
  }
};

// Raw products into scores, which `unit` makes powers of two: capped, and minus infinity where a row does not see the key.
__attribute__((noinline)) inline void finish_scores(const Scoring& a, const Block& b, const float* k_scale, bool masked,
                                                    const int32_t* position, const int32_t* sees, int64_t from,
                                                    int64_t stop, float* s) {
  I lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  float inverse = a.soft_cap ? a.scale / a.soft_cap : 0;
  for (int64_t r = from; r < stop; ++r)
    for (int g = 0; g < GROUPS; ++g) {
      float* at = s + r * BLOCK + g * W;
      F x = splat(NONE);
      if (g >= b.first() && g < b.stop()) {
        x = load(at);
        if (k_scale) x *= load(k_scale + g * W);
        if (a.soft_cap) x = tanh(x * inverse);
        if (masked) {
          int64_t last = sees[r] - b.base, before = std::max<int64_t>(a.hidden(position[r]) - b.base, -1);
          I j = lane + static_cast<int>(g * W);
          x = (j <= static_cast<int>(last)) & (j > static_cast<int>(before)) ? x : splat(NONE);
        }
      }
      store(at, x);
    }
}

// Scores into weights, times the scales of values that are codes; the sums so far shrink where a better score has come.
template <typename Weight>
__attribute__((noinline)) void weigh(float unit, int64_t from, int64_t stop, const float* s, const float* v_scale,
                                     Weight* weights, Sums sums, float* totals, int64_t V) {
  for (int64_t r = from; r < stop; ++r) {
    const float* row = s + r * BLOCK;
    float* out = sums.out + r * V;
    F top = load(row) * unit, sum = load(totals + r * W), part[2] = {};
    for (int g = 1; g < GROUPS; ++g) {
      F x = load(row + g * W) * unit;
      top = x > top ? x : top;
    }
    float best = highest(top);
    if (best > sums.best[r]) {
      float shrink = power(sums.best[r] - best);
      sums.best[r] = best;
      sum *= shrink;
      for (int64_t i = 0; i < V; i += W) store(out + i, load(out + i) * shrink);
    }
    best = sums.best[r] == NONE ? 0 : sums.best[r];
    for (int g = 0; g < GROUPS; ++g) {
      F weight = power(load(row + g * W) * unit - best);
      part[g % 2] += weight;
      if (v_scale) weight *= load(v_scale + g * W);
      store_weights(weights + r * BLOCK, g * W, weight);
    }
    store(totals + r * W, sum + (part[0] + part[1]));
  }
}

}  // namespace attention
}  // namespace quire
