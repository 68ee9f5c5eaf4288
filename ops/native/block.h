// Arithmetic of paged attention on one block of keys: transposing keys, scores, the online softmax, and the weighted
// sum of values.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "common.h"

namespace quire {
namespace attention {

// Register tiles: the accumulators of TILE_ROWS rows (query heads) by TILE_VECTORS vectors take 24 of 32 registers, or
// 12 of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 6;
#else
constexpr int TILE_ROWS = 3;
#endif
constexpr int TILE_VECTORS = 4;

constexpr int64_t BLOCK = 64;  // keys
constexpr int64_t KEY_VECTORS = BLOCK / W;
constexpr float LOG2E = 1.44269504f;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float UnalignedF __attribute__((vector_size(4 * W), aligned(4)));
typedef uint32_t U128 __attribute__((vector_size(16)));

inline F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
inline void store(float* p, F x) { *reinterpret_cast<UnalignedF*>(p) = x; }
inline F splat(float x) { return F{} + x; }

// 2^x for x <= 0 (or above by a rounding error), within one unit in the last place; 0 below -126.
inline F exp2(F x) {
  const float round_bias = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  F y = x > -126.0f ? x : splat(-126.0f);
  F shifted = y + round_bias;
  F f = y - (shifted - round_bias);
  F p = f * 1.5353362e-4f + 1.3398875e-3f;
  p = p * f + 9.6184369e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  p = (F)((U)p + ((U)shifted << 23));
  return x < -126.0f ? F{} : p;
}
inline float exp2(float x) { return exp2(splat(x))[0]; }

inline F tanh(F x) {
  F e = exp2((x < 0.0f ? x : -x) * (2 * LOG2E));
  F y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

// Reduces the lanes by halves.
template <typename Operation>
float fold(F x, const Operation& operation) {
  float array[W];
  store(array, x);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) array[i] = operation(array[i], array[i + n]);
  return array[0];
}
inline float sum_lanes(F x) {
  return fold(x, [](float a, float b) { return a + b; });
}
inline float max_lane(F x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return fold(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

// An element of int4 pages: two values plus 8, the first in the low four bits.
struct Int4Pair {
  uint8_t codes;
};

// Dimensions that an element of pages holds.
template <typename Page>
constexpr int64_t ELEMENT_DIMS = std::is_same_v<Page, Int4Pair> ? 2 : 1;

// Decodes the lowest four bits of each lane to float.
inline F decode_int4(U codes) {
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)codes,
                                  _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
#else
  return (F)((codes & 15u) | 0x4b000000u) - 8388616.0f;  // the bits of 2^23 + code
#endif
}

// The position of a query's dimension in the order of decoded int4 keys: bfloat16 pairs are dimensions i and i + 4 of
// eight.
template <typename X>
constexpr int64_t query_position(int64_t dimension) {
  if (sizeof(X) == 4) return dimension;
  return dimension / 8 * 8 + dimension % 4 * 2 + dimension / 4 % 2;
}

// The upper half of a float's bits: bfloat16, rounded towards zero.
inline uint16_t truncate_to_bf16(float x) {
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
    return truncate_to_bf16(static_cast<float>(x));
  else if constexpr (std::is_same_v<To, uint16_t>)
    return float_to_bf16(x);
  else
    return static_cast<To>(x);
}

// Operations that transpose 4 x 4 blocks of 32-bit words, in each 128-bit part of a vector by itself.
#if defined(__AVX512F__)
typedef uint32_t Words __attribute__((vector_size(64)));
inline Words concatenate(const U128* x) {
  __m512i words = _mm512_castsi128_si512((__m128i)x[0]);
  words = _mm512_inserti32x4(words, (__m128i)x[1], 1);
  words = _mm512_inserti32x4(words, (__m128i)x[2], 2);
  return (Words)_mm512_inserti32x4(words, (__m128i)x[3], 3);
}
inline Words unpack_low32(Words a, Words b) { return (Words)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
inline Words unpack_high32(Words a, Words b) { return (Words)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
inline Words unpack_low64(Words a, Words b) { return (Words)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
inline Words unpack_high64(Words a, Words b) { return (Words)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
typedef uint32_t Words __attribute__((vector_size(32)));
inline Words concatenate(const U128* x) {
  return (Words)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)x[0]), (__m128i)x[1], 1);
}
inline Words unpack_low32(Words a, Words b) { return (Words)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
inline Words unpack_high32(Words a, Words b) { return (Words)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
inline Words unpack_low64(Words a, Words b) { return (Words)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
inline Words unpack_high64(Words a, Words b) { return (Words)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
typedef U128 Words;
inline Words concatenate(const U128* x) { return x[0]; }
inline Words unpack_low32(Words a, Words b) { return Words{a[0], b[0], a[1], b[1]}; }
inline Words unpack_high32(Words a, Words b) { return Words{a[2], b[2], a[3], b[3]}; }
inline Words unpack_low64(Words a, Words b) { return Words{a[0], a[1], b[0], b[1]}; }
inline Words unpack_high64(Words a, Words b) { return Words{a[2], a[3], b[2], b[3]}; }
#endif
constexpr int WORDS = sizeof(Words) / 4;

// A block of key positions. Keys begin to end (relative to `base`) are visible to some row of the tile.
struct KeyBlock {
  int64_t base;  // position of the first key
  int begin, end;
  int64_t slot[BLOCK];         // of each key in the pages
  int64_t scale_index[BLOCK];  // of each key's scale for head 0

  // The range of vectors of keys.
  int first_vector() const { return begin / W; }
  int end_vector() const { return (end + W - 1) / W; }
};

// Prefetches the next block's keys and values while this block is computed: evenly, so that memory is always busy, and
// in memory order with all heads of a position together, since strided access has half the bandwidth.
class Prefetcher {
 public:
  explicit Prefetcher(int64_t bytes) : bytes(bytes) {}  // per range
  void add_range(const void* address) { *last++ = static_cast<const char*>(address); }
  void step() {
    for (int i = 0; i < 2; ++i, line += 64) {
      if (line >= line_end) {
        line = next < last ? *next++ : reinterpret_cast<const char*>(this);
        line_end = line + bytes;
      }
      __builtin_prefetch(line, 0, 2);
    }
  }
  void finish() {
    while (next < last) step();
  }

 private:
  const char *ranges[2 * BLOCK], **next = ranges, **last = ranges, *line = nullptr, *line_end = nullptr;
  int64_t bytes;
};

// Transposes W keys of H dimensions to [word][W keys], where a word is a float or a pair of bfloat16.
template <typename X>
void transpose_keys(const X* const* key, int64_t H, uint32_t* out, Prefetcher& prefetcher) {
  constexpr int64_t STEP = 16 / sizeof(X);
  for (int j = 0; j < W; j += WORDS)
    for (int64_t h = 0; h < H; h += STEP) {
      prefetcher.step();
      Words x[4];
      for (int i = 0; i < 4; ++i) {
        U128 parts[WORDS / 4];
        for (int k = 0; k < WORDS / 4; ++k) std::memcpy(parts + k, key[j + 4 * k + i] + h, 16);
        x[i] = concatenate(parts);
      }
      Words a = unpack_low32(x[0], x[1]), b = unpack_high32(x[0], x[1]);
      Words c = unpack_low32(x[2], x[3]), d = unpack_high32(x[2], x[3]);
      Words y[4] = {unpack_low64(a, c), unpack_high64(a, c), unpack_low64(b, d), unpack_high64(b, d)};
      for (int i = 0; i < 4; ++i) std::memcpy(out + (h / STEP * 4 + i) * W + j, y + i, sizeof(Words));
    }
}

// Decodes int4 keys from transposed words of eight codes, [num_words][W keys], to transposed words of X.
template <typename X>
void decode_keys(const uint32_t* codes, int64_t num_words, uint32_t* out) {
#if defined(__AVX512BF16__)
  // bfloat16 of -8 to 7. The lookup uses five bits, of which the fifth belongs to the next code; so the table is
  // repeated.
  __m256i table16 = _mm256_setr_epi16(
      0xc100 - 0x10000, 0xc0e0 - 0x10000, 0xc0c0 - 0x10000, 0xc0a0 - 0x10000, 0xc080 - 0x10000, 0xc040 - 0x10000,
      0xc000 - 0x10000, 0xbf80 - 0x10000, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0);
  __m512i table = _mm512_broadcast_i64x4(table16);
#endif
  for (int64_t i = 0; i < num_words; ++i) {
    U word = load_as<U>(codes + i * W);
    for (int n = 0; n < (sizeof(X) == 4 ? 8 : 4); ++n, word >>= 4, out += W) {
      if constexpr (sizeof(X) == 4) {
        F values = decode_int4(word);
        std::memcpy(out, &values, sizeof(F));
      } else {
#if defined(__AVX512BF16__)
        U pairs = (U)_mm512_permutexvar_epi16((__m512i)word, table);
#else
        U pairs = (U)decode_int4(word) >> 16 | ((U)decode_int4(word >> 16) & 0xffff0000u);
#endif
        std::memcpy(out, &pairs, sizeof(U));
      }
    }
  }
}

// The type of queries for keys of type X: bfloat16 if the CPU multiplies bfloat16 pairs, else float.
#if defined(QUIRE_BF16_PAIRS)
template <typename X>
using Query = X;
#else
template <typename X>
using Query = float;
#endif

// sums + the products of a word of W keys and the query's dimensions of that word.
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

// Scores of R rows and N vectors of transposed keys.
template <typename X, int R, int N>
void score_tile(const Query<X>* q, const uint32_t* keys, int64_t H, float* s, Prefetcher& prefetcher) {
  constexpr int64_t STEP = 4 / sizeof(X);
  F sums[R][N] = {};
  for (int64_t h = 0; h < H; h += STEP) {
    prefetcher.step();
    for (int n = 0; n < N; ++n) {
      U words = load_as<U>(keys + (n * H + h) / STEP * W);
      for (int r = 0; r < R; ++r) sums[r][n] = dot<X>(sums[r][n], words, q + r * H + h);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(s + r * BLOCK + n * W, sums[r][n]);
}

// Whether attention weights are rounded to bfloat16, since the CPU multiplies pairs of them with the values of two
// keys.
template <typename X>
constexpr bool USES_BF16_PAIRS = std::is_same_v<Query<X>, uint16_t>;

// Whether bfloat16 keys are unpacked to float once for many rows: the CPU does not multiply pairs, and unpacking them
// in every register tile takes as long as the products.
template <typename X>
constexpr bool UNPACKS_KEYS = sizeof(X) == 2 && !USES_BF16_PAIRS<X>;

// Unpacks vectors of bfloat16 pairs to two vectors of floats each: the first of each pair, then the second.
inline void unpack_pairs(const uint32_t* pair_vectors, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    U pairs = load_as<U>(pair_vectors + i * W);
    store(out + 2 * i * W, (F)(pairs << 16));
    store(out + (2 * i + 1) * W, (F)(pairs & 0xffff0000u));
  }
}

// Calls run(row, count) for register tiles of rows of about equal size; count is a compile-time constant from 1 to
// TILE_ROWS.
template <typename Run, int R = TILE_ROWS>
void dispatch_rows(int64_t row, int64_t count, const Run& run) {
  if (count == R)
    run(row, std::integral_constant<int, R>());
  else if constexpr (R > 1)
    dispatch_rows<Run, R - 1>(row, count, run);
}
template <typename Run>
void for_each_row_tile(int64_t row, int64_t stop, const Run& run) {
  int64_t num_tiles = (stop - row + TILE_ROWS - 1) / TILE_ROWS;
  for (; num_tiles; --num_tiles) {
    int64_t count = (stop - row + num_tiles - 1) / num_tiles;
    dispatch_rows(row, count, run);
    row += count;
  }
}

// Values are loaded VALUE_STEP dimensions at a time. For bfloat16 and int4 pairs the even dimensions come first and
// then the odd ones, which takes no shuffles.
template <typename X>
constexpr int VALUE_STEP = sizeof(X) == 2 || ELEMENT_DIMS<X> == 2 ? 2 * W : W;

inline void load_values(const float* p, F* v) { v[0] = load(p); }
inline void load_values(const int8_t* p, F* v) { v[0] = load_bytes(p); }
inline void load_values(const uint16_t* p, F* v) {
  U pairs = load_as<U>(p);
  v[0] = (F)(pairs << 16);
  v[1] = (F)(pairs & 0xffff0000u);
}
inline void load_values(const Int4Pair* p, F* v) {
#if defined(__AVX512F__)  // intrinsics, since GCC would convert lane by lane
  U pairs = (U)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  U pairs = (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  U pairs = __builtin_convertvector(load_as<U8>(p), U);
#endif
  v[0] = decode_int4(pairs);
  v[1] = decode_int4(pairs >> 4);
}

// Loads the values of two keys as pairs of bfloat16, which represent the values of pages exactly; or pairs that
// `convert_values` has stored.
template <typename X>
void load_pairs(const X* first, const X* second, U* pairs) {
  F v[2][VALUE_STEP<X> / W];
  load_values(first, v[0]);
  load_values(second, v[1]);
  for (int i = 0; i < VALUE_STEP<X> / W; ++i) pairs[i] = (U)v[0][i] >> 16 | ((U)v[1][i] & 0xffff0000u);
}
inline void load_pairs(const uint32_t* stored, const uint32_t*, U* pairs) { pairs[0] = load_as<U>(stored); }

// Stores the first `n` of VALUE_STEP<X> results, restoring the order of dimensions from that of load_values.
template <typename X, typename Y>
void store_results(Y* out, const F* v, int64_t n) {
  if constexpr (VALUE_STEP<X> == 2 * W && sizeof(Y) == 2) {
    U bits[2];
    for (int i = 0; i < 2; ++i) {
      U x = (U)v[i], nan = (x & 0x7fffffffu) > 0x7f800000u;
      bits[i] = nan ? x | 0x400000u : x + 0x7fffu + ((x >> 16) & 1u);
    }
    U words = bits[0] >> 16 | (bits[1] & 0xffff0000u);
    std::memcpy(out, &words, n * sizeof(Y));
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = convert<Y>(v[i % (VALUE_STEP<X> / W)][i / (VALUE_STEP<X> / W)]);
  }
}

// Stores attention weights as float, or rounded to bfloat16.
inline void store_weights(float* row, int index, F weights) { store(row + index, weights); }
inline void store_weights(uint16_t* row, int index, F weights) {
#if defined(__AVX512BF16__)
  U16 rounded = (U16)_mm512_cvtneps_pbh((__m512)weights);
#else
  U16 rounded = float_to_bf16(weights);
#endif
  std::memcpy(row + index, &rounded, sizeof(rounded));
}

// out += weights x values, for R rows, N vectors of dimensions and the keys begin to end; `dim` is the first dimension
// in the memory of a value. bfloat16 weights are multiplied for two keys at a time, and `begin` is even.
template <typename X, int R, int N>
void accumulate_values(const uint16_t* weights, const X* const* value, int64_t dim, int begin, int end, float* out,
                       int64_t V, Prefetcher& prefetcher) {
  F sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = load(out + r * V + n * W);
  for (int j = begin; j < end; j += 2) {
    prefetcher.step();
    prefetcher.step();
    U pairs[N];
    for (int n = 0; n < N; n += VALUE_STEP<X> / W) {
      int64_t offset = (dim + n * W) / ELEMENT_DIMS<X>;
      load_pairs(value[j] + offset, value[j + 1] + offset, pairs + n);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sums[r][n] = dot<uint16_t>(sums[r][n], pairs[n], weights + r * BLOCK + j);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * V + n * W, sums[r][n]);
}
template <typename X, int R, int N>
void accumulate_values(const float* weights, const X* const* value, int64_t dim, int begin, int end, float* out,
                       int64_t V, Prefetcher& prefetcher) {
  F sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = load(out + r * V + n * W);
  for (int j = begin; j < end; ++j) {
    prefetcher.step();
    if constexpr (TILE_ROWS < 6) {  // few registers: only the weights of rows are kept in them
      F weight[R];
      for (int r = 0; r < R; ++r) weight[r] = weights[r * BLOCK + j] - F{};
      for (int n = 0; n < N; n += VALUE_STEP<X> / W) {
        F v[VALUE_STEP<X> / W];
        load_values(value[j] + (dim + n * W) / ELEMENT_DIMS<X>, v);
        for (int i = 0; i < VALUE_STEP<X> / W; ++i)
          for (int r = 0; r < R; ++r) sums[r][n + i] += v[i] * weight[r];
      }
    } else {
      F v[N];
      for (int n = 0; n < N; n += VALUE_STEP<X> / W) load_values(value[j] + (dim + n * W) / ELEMENT_DIMS<X>, v + n);
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sums[r][n] += v[n] * weights[r * BLOCK + j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * V + n * W, sums[r][n]);
}

// Calls accumulate_values for `num_vectors`, a multiple of STEP.
template <int R, int STEP, int N = TILE_VECTORS, typename Weight, typename X>
void dispatch_values(int64_t num_vectors, const Weight* weights, const X* const* value, int64_t dim, int begin, int end,
                     float* out, int64_t V, Prefetcher& prefetcher) {
  if (num_vectors == N)
    accumulate_values<X, R, N>(weights, value, dim, begin, end, out, V, prefetcher);
  else if constexpr (N > STEP)
    dispatch_values<R, STEP, N - STEP>(num_vectors, weights, value, dim, begin, end, out, V, prefetcher);
}

// State of an online softmax over R rows: weighted sums of values [R, V], largest scores [R] and sums of weights [R].
// Scores are exponents of two: a weight is 2^(score - max_score).
struct SoftmaxState {
  float *values, *max_score, *weight_sum;

  static int64_t size(int64_t R, int64_t V) { return R * V + (2 * R + W - 1) / W * W; }
  SoftmaxState(float* memory, int64_t R, int64_t V)
      : values(memory), max_score(memory + R * V), weight_sum(max_score + R) {}

  void clear(int64_t R, int64_t V) {
    std::fill_n(values, R * V, 0.0f);
    std::fill_n(max_score, R, MINUS_INFINITY);
    std::fill_n(weight_sum, R, 0.0f);
  }
};

// Merges the softmax over other keys into `state`. This and the next two functions are never inlined, so that the
// compiler contracts to FMAs in the same way for all callers.
__attribute__((noinline)) inline void merge(SoftmaxState state, SoftmaxState addend, int64_t R, int64_t V) {
  for (int64_t r = 0; r < R; ++r) {
    float max_score = std::max(state.max_score[r], addend.max_score[r]);
    if (max_score == MINUS_INFINITY) continue;
    float state_factor = exp2(state.max_score[r] - max_score), addend_factor = exp2(addend.max_score[r] - max_score);
    state.max_score[r] = max_score;
    state.weight_sum[r] = state.weight_sum[r] * state_factor + addend.weight_sum[r] * addend_factor;
    float *x = state.values + r * V, *y = addend.values + r * V;
    for (int64_t i = 0; i < V; i += W) store(x + i, load(x + i) * state_factor + load(y + i) * addend_factor);
  }
}

// How scores are computed and masked.
struct Scoring {
  float scale;
  float soft_cap;         // 0: none
  int64_t window;         // of positions up to a row's own; larger than any position: none
  bool chunked = false;   // rows see only positions since the last multiple of `window`
  int64_t lookahead = 0;  // positions after its own that a row sees too, up to the end of its sequence

  // The factor from raw scores, or from capped scores of at most 1, to exponents of two.
  float log2_scale() const { return (soft_cap ? soft_cap : scale) * LOG2E; }
  // The last position before those that a row sees.
  int64_t last_hidden(int64_t position) const {
    return chunked ? position - position % window - 1 : position - window;
  }
};

// Applies key scales, the soft cap and the mask to raw products of queries and keys. Masked scores are -infinity; the
// others are exponents of two once they are multiplied with `log2_scale`.
__attribute__((noinline)) inline void finish_scores(const Scoring& scoring, const KeyBlock& block, const float* k_scale,
                                                    bool is_masked, const int32_t* position,
                                                    const int32_t* last_visible, int64_t first_row, int64_t end_row,
                                                    float* scores) {
  I lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  float cap_factor = scoring.soft_cap ? scoring.scale / scoring.soft_cap : 0;
  for (int64_t r = first_row; r < end_row; ++r)
    for (int g = 0; g < KEY_VECTORS; ++g) {
      float* row_scores = scores + r * BLOCK + g * W;
      F x = splat(MINUS_INFINITY);
      if (g >= block.first_vector() && g < block.end_vector()) {
        x = load(row_scores);
        if (k_scale) x *= load(k_scale + g * W);
        if (scoring.soft_cap) x = tanh(x * cap_factor);
        if (is_masked) {
          int64_t last = last_visible[r] - block.base;
          int64_t before = std::max<int64_t>(scoring.last_hidden(position[r]) - block.base, -1);
          I j = lane + static_cast<int>(g * W);
          x = (j <= static_cast<int>(last)) & (j > static_cast<int>(before)) ? x : splat(MINUS_INFINITY);
        }
      }
      store(row_scores, x);
    }
}

// Converts a block's scores to attention weights, multiplied with the scales of int8 or int4 values, and updates the
// softmax: `state` is rescaled where the largest score grows, and the weights are added to weight_sum_lanes [R, W].
template <typename Weight>
__attribute__((noinline)) void compute_weights(float log2_scale, int64_t first_row, int64_t end_row,
                                               const float* scores, const float* v_scale, Weight* weights,
                                               SoftmaxState state, float* weight_sum_lanes, int64_t V) {
  for (int64_t r = first_row; r < end_row; ++r) {
    const float* row_scores = scores + r * BLOCK;
    float* values = state.values + r * V;
    F max_lanes = load(row_scores) * log2_scale, sum = load(weight_sum_lanes + r * W), partial_sums[2] = {};
    for (int g = 1; g < KEY_VECTORS; ++g) {
      F x = load(row_scores + g * W) * log2_scale;
      max_lanes = x > max_lanes ? x : max_lanes;
    }
    float max_score = max_lane(max_lanes);
    if (max_score > state.max_score[r]) {
      float factor = exp2(state.max_score[r] - max_score);
      state.max_score[r] = max_score;
      sum *= factor;
      for (int64_t i = 0; i < V; i += W) store(values + i, load(values + i) * factor);
    }
    max_score = state.max_score[r] == MINUS_INFINITY ? 0 : state.max_score[r];
    for (int g = 0; g < KEY_VECTORS; ++g) {
      F weight = exp2(load(row_scores + g * W) * log2_scale - max_score);
      partial_sums[g % 2] += weight;
      if (v_scale) weight *= load(v_scale + g * W);
      store_weights(weights + r * BLOCK, g * W, weight);
    }
    store(weight_sum_lanes + r * W, sum + (partial_sums[0] + partial_sums[1]));
  }
}

}  // namespace attention
}  // namespace quire
