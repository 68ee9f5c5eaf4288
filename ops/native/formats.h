// Weight products. A weight lies in blocks of sixteen outputs; inside one, the inputs follow each other in small groups
// that one vector lane multiplies and adds at once:
//
//   [output / 16][input / group][16 outputs][group]
//
//   float32    group 1
//   bfloat16   group 2    sixteen of its vectors are a tile of AMX
//   int8       group 4    the same
//   eight bits group 2    of codes under rows of bfloat16: int8, FP8
//   four bits  group 8    a lane's low half holds k0 k2 k4 k6 and its high half k1 k3 k5 k7: int4, MXFP4, NF4
//   six bits   group 16   three words, see Sixes
//   five bits  group 32   five words, see Fives
//
// Rows that are taken together lie interleaved, a group of each after the other: [input / group][rows][group].
//
// Every format sums over the inputs in one order, whatever the number of rows, so a row's result does not depend on
// which others are computed with it. K is a multiple of 32, of int8 one of 64: what is missing lies there as zeros, in weights and rows.
#pragma once

#include "amx.h"
#include "common.h"

namespace quire {

constexpr int H = PARTS;  // vectors of a block

// Rows and blocks whose sums stay in registers: 24 of AVX-512's 32, or 12 of AVX2's 16. A few rows more go with half the
// blocks: where no more than those meet a weight, it then comes from memory behind their arithmetic. Where there are few
// registers this is done for any number of rows: each number that is made of a weight meets twice as many.
#if defined(__AVX512F__)
constexpr int ROWS = 6, BLOCKS = 4, MANY = 12;
constexpr bool FEW_REGISTERS = false;
#else
constexpr int ROWS = 3, BLOCKS = 2, MANY = 6;
constexpr bool FEW_REGISTERS = true;
#endif

// Into the second-level cache, beside the arithmetic. What is being fetched already costs nothing. Written out, since GCC
// leaves out calls of functions that do nothing else.
inline void fetch(const void* at) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(at)));
#elif defined(__aarch64__)
  asm volatile("prfm pldl2keep, %0" : : "Q"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 0, 2);
#endif
}

// Blocks of a weight that rows meet together, and how many blocks further on lies what each may fetch; 0 is nothing.
struct Panel {
  int64_t block[BLOCKS], then[BLOCKS];
  const float* wide;  // the same weights as floats, [block][input][16 outputs]; or null
};

// Whether so many vectors of sums leave registers for addresses to fetch, beside what decoding takes.
constexpr bool room(int sums) { return sums <= 12; }

// Of the INPUTS inputs from k on the weights that lie so much further than each of N blocks.
template <int N, int64_t INPUTS, typename Format>
__attribute__((always_inline)) inline void fetch_next(const Format& f, const Panel& panel, int64_t K, int64_t k) {
  constexpr int64_t BYTES = LANES * Format::BITS / 8;  // of a block, for an input
  auto* w = reinterpret_cast<const char*>(f.w);
  UNROLL for (int n = 0; n < N; ++n)
    UNROLL for (int64_t line = 0; line < INPUTS * BYTES; line += 64)
      fetch(w + ((panel.block[n] + panel.then[n]) * K + k) * BYTES + line);
}

// Rows that meet weights of bfloat16 or of fewer bits hold bfloat16 themselves: as such where the machine multiplies
// pairs of them, else as floats. With QUIRE_FLOAT_ROWS they are floats with all their bits.
#if defined(QUIRE_FLOAT_ROWS)
constexpr bool NARROW_ROWS = false;
#else
constexpr bool NARROW_ROWS = true;
#endif
#if defined(QUIRE_BF16_PAIRS)
typedef uint16_t Half;
#else
typedef float Half;
#endif
inline float value(uint16_t x) { return widen(x); }
inline float value(float x) { return x; }

// So many inputs of each output, as they are multiplied at once.
#if defined(QUIRE_BF16_PAIRS)
constexpr int STEP = 2;
typedef U Numbers;

inline F dot(F acc, Numbers w, const Half* x) {
#if defined(__aarch64__)
  return dot_pair(acc, w, x);
#else
  // Written out, so that the pair is spread as it is read: the compiler would keep the pairs of all rows in registers.
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const uint16_t(*)[2]>(x)));
  return acc;
#endif
}
inline Numbers numbers(U bits, int) { return bits; }

// Of a pair of floats that bfloat16 holds: both.
template <typename One>
__attribute__((always_inline)) inline Numbers made(const One& one, int) {
  return (U)one(0) >> 16 | ((U)one(1) & 0xffff0000u);
}
#else
constexpr int STEP = 1;
typedef F Numbers;

inline F dot(F acc, Numbers w, const Half* x) {
#if defined(QUIRE_FLOAT_ROWS) && defined(__AVX512F__)
  // Written out where products are not exact: one rounding or two must not depend on what the compiler makes of a loop.
  return (F)_mm512_fmadd_ps((__m512)w, _mm512_set1_ps(x[0]), (__m512)acc);
#elif defined(QUIRE_FLOAT_ROWS) && defined(__AVX2__) && defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)w, _mm256_set1_ps(x[0]), (__m256)acc);
#elif defined(QUIRE_FLOAT_ROWS) && defined(__aarch64__)
  return (F)vfmaq_n_f32((float32x4_t)acc, (float32x4_t)w, x[0]);
#else
  return acc + w * value(x[0]);
#endif
}

// The even or the odd ones of pairs of bfloat16.
inline Numbers numbers(U bits, int i) { return (F)(i ? bits & 0xffff0000u : bits << 16); }

// Of a pair of floats: the one that is asked for.
template <typename One>
__attribute__((always_inline)) inline Numbers made(const One& one, int i) {
  return one(i);
}
#endif

// `dot` where sums take most of the registers. Written out for AVX2, so that each stays in its own: the compiler would let
// them change places with weights, until one has to wait in memory for its turn.
inline F dot_in_place(F acc, Numbers w, const Half* x) {
#if defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(_mm256_broadcast_ss(x)));
  return acc;
#else
  return dot(acc, w, x);
#endif
}

// acc + the products of the WORD inputs from k on. One after the other for all outputs, so that no more than one number
// of each row is in a register. By recursion: a loop whose turns differ much is unrolled too late for sums in registers.
template <bool WIDE, int i = 0, typename Format, int R, int N>
__attribute__((always_inline)) inline void add_word(const Format& f, const Half* x, int64_t K, int64_t k,
                                                    const Panel& panel, F (&acc)[R][N][H]) {
  auto weight = [&](int n, int h) -> Numbers {
    if constexpr (WIDE)
      return lanes<Numbers>(panel.wide + (n * K + k + i) * LANES + h * W);
    else
      return f.part(panel.block[n], K, k, h, i);
  };
  auto row = [&](int r) { return x + (k + i * STEP) * R + r * STEP; };
  if constexpr (STEP == 1 && N * H < R) {
    Numbers w[N][H];
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int h = 0; h < H; ++h) w[n][h] = weight(n, h);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) acc[r][n][h] = dot_in_place(acc[r][n][h], w[n][h], row(r));
  } else {
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int h = 0; h < H; ++h) {
        Numbers w = weight(n, h);
        UNROLL for (int r = 0; r < R; ++r) acc[r][n][h] = dot(acc[r][n][h], w, row(r));
      }
  }
  if constexpr (i + 1 < Format::WORD / STEP) add_word<WIDE, i + 1>(f, x, K, k, panel, acc);
}

// A block of weights as floats.
template <typename Format>
void widen_block(const Format& f, int64_t block, int64_t K, float* to) {
  for (int64_t k = 0; k < K; k += Format::WORD)
    UNROLL for (int i = 0; i < Format::WORD; ++i)
      UNROLL for (int h = 0; h < H; ++h) {
        Numbers w = f.part(block, K, k, h, i);
        std::memcpy(to + (k + i) * LANES + h * W, &w, sizeof(w));
      }
}

// acc + the products of fours of signed bytes with one four; `x` carries 128 more than it means where the machine
// multiplies unsigned by signed bytes.
#if defined(__AVX512VNNI__) && !defined(QUIRE_AMX)
constexpr int BIAS = 128;

inline I dot_fours(I acc, U w, const uint8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return (I)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), (__m512i)w);
}
#else
constexpr int BIAS = 0;

#if defined(__ARM_FEATURE_DOTPROD)
inline I dot_signed(I acc, U w, uint32_t four) {
  return (I)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)vdupq_n_u32(four));
}

inline I dot_fours(I acc, U w, const uint8_t* x) {
  uint32_t four;
  std::memcpy(&four, x, 4);
  return dot_signed(acc, w, four);
}
#elif defined(__x86_64__)
typedef int16_t Words __attribute__((vector_size(4 * W)));

// Each pair of words multiplied, and the two products added.
inline I dot_words(Words a, Words b) {
#if defined(__AVX512F__)
  return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

inline I dot_fours(I acc, U w, const uint8_t* x) {
  uint32_t four;
  std::memcpy(&four, x, 4);
  Words ws = (Words)w, xs = (Words)(U{} + four);
  acc += dot_words(ws << 8 >> 8, xs << 8 >> 8);
  return acc + dot_words(ws >> 8, xs >> 8);
}
#else
inline I dot_fours(I acc, U w, const uint8_t* x) {
  for (int i = 0; i < 4; ++i) acc += ((I)(w << (24 - 8 * i)) >> 24) * static_cast<int8_t>(x[i]);
  return acc;
}
#endif
#endif

struct F32 {
  using Weight = float;
  using X = float;  // a row's numbers
  static constexpr bool NARROW = false;  // whether they are bfloat16
  static constexpr bool WIDENS = false;  // whether the weights become floats first, where many rows meet them
  static constexpr int64_t BITS = 32;  // a weight
  static constexpr bool TILES = false;  // whether AMX takes it
  static constexpr int64_t GROUP = 1;  // inputs of a row that lie together
  static constexpr int MOST = ROWS;  // rows at once
  static constexpr int FULL = ROWS;  // and of those so many with all blocks; more of them with half, not to spill registers
  const float* w;

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool WIDE>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    F acc[R][N][H] = {};
    x += row * K;
    for (int64_t k = 0; k < K; ++k) {
      if constexpr (room(R * N * H)) fetch_next<N, 1>(*this, panel, K, k);
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          F v = lanes<F>(w + (panel.block[n] * K + k) * LANES + h * W);
          UNROLL for (int r = 0; r < R; ++r) acc[r][n][h] += v * x[k * R + r];
        }
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

struct Bf16 {
  using Weight = uint16_t;
#if defined(QUIRE_AMX)
  using X = uint16_t;
#else
  using X = Half;
#endif
  static constexpr bool NARROW = NARROW_ROWS;
  static constexpr int64_t BITS = 16;
  static constexpr bool WIDENS = false;
  static constexpr bool TILES = true;
  static constexpr int64_t WORD = 2, GROUP = STEP;
  static constexpr int MOST = MANY, FULL = ROWS;
  const uint16_t* w;

  Numbers part(int64_t block, int64_t K, int64_t k, int h, int i) const {
    return numbers(lanes<U>(w + (block * K + k) * LANES + 2 * h * W), i);
  }

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool WIDE>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    F acc[R][N][H] = {};
    for (int64_t k = 0; k < K; k += 2) {
      fetch_next<N, 2>(*this, panel, K, k);
      add_word<WIDE>(*this, x + row * K, K, k, panel, acc);
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// Signed bytes, a scale an output. The rows come as bytes too, with a scale each.
struct Int8 {
  using X = uint8_t;
  static constexpr bool WIDENS = false;
  static constexpr int64_t BITS = 8;
  static constexpr bool TILES = true;
  static constexpr int64_t GROUP = 4;
  static constexpr int MOST = FEW_REGISTERS ? ROWS : MANY, FULL = ROWS;  // rows' bytes take registers too
  const int8_t* w;
  const float* scale;    // [O]
  const int32_t* sum;    // [O]: over the inputs, to take BIAS back out
  const float* x_scale;  // [T]

  // From the sums' bits to what they mean.
  f32x16 finish(f32x16 bits, int64_t block, int64_t row) const {
    const int32_t* excess = sum + block * LANES;
    f32x16 found;
    UNROLL for (int h = 0; h < H; ++h)
      found.part[h] = __builtin_convertvector((I)bits.part[h] - lanes<I>(excess + h * W) * BIAS, F);
    return found * (load(scale + block * LANES) * x_scale[row]);
  }

  template <int R, int N, bool WIDE>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    I acc[R][N][H] = {};
    x += row * K;
    for (int64_t k = 0; k < K; k += 4) {
      fetch_next<N, 4>(*this, panel, K, k);
      UNROLL for (int n = 0; n < N; ++n) {
        const int8_t* at = w + (panel.block[n] * K + k) * LANES;
        UNROLL for (int h = 0; h < H; ++h) {
          U v = lanes<U>(at + 4 * h * W);
          UNROLL for (int r = 0; r < R; ++r) acc[r][n][h] = dot_fours(acc[r][n][h], v, x + k * R + 4 * r);
        }
      }
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// Two signed bytes of each output.
inline Numbers from_bytes(const int8_t* p, int i) {
#if defined(QUIRE_BF16_PAIRS) && defined(__AVX512BF16__)
  I8 bytes[2];
  std::memcpy(bytes, p, 32);
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes[0]));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes[1]));
  return (U)_mm512_cvtne2ps_pbh(high, low);
#else
  I wide = (I)spread(lanes<U16>(p));
  return made([&](int i) -> F { return __builtin_convertvector((i ? wide << 16 : wide << 24) >> 24, F); }, i);
#endif
}

// The same weights under rows of bfloat16; laid out in groups of two.
struct Int8Wide {
  using X = Half;
  static constexpr bool NARROW = NARROW_ROWS;
  static constexpr int64_t BITS = 8;
  static constexpr bool WIDENS = STEP == 1 && !FEW_REGISTERS;  // where there are few, six rows share each number as it is
  static constexpr bool TILES = false;
  static constexpr int64_t WORD = 2, GROUP = STEP;
  static constexpr int MOST = STEP == 1 ? MANY : ROWS, FULL = ROWS;
  const int8_t* w;
  const float* scale;

  Numbers part(int64_t block, int64_t K, int64_t k, int h, int i) const {
    return from_bytes(w + (block * K + k) * LANES + 2 * h * W, i);
  }

  f32x16 finish(f32x16 sum, int64_t block, int64_t) const { return sum * load(scale + block * LANES); }

  template <int R, int N, bool WIDE>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    F acc[R][N][H] = {};
    for (int64_t k = 0; k < K; k += 2) {
      if constexpr (room(R * N * H)) fetch_next<N, 2>(*this, panel, K, k);
      add_word<WIDE>(*this, x + row * K, K, k, panel, acc);
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// Two floats of eight bits, E4M3, of each output, as a part UNIT of what they are; codes that are no numbers do not occur.
#if defined(__F16C__) && !defined(QUIRE_BF16_PAIRS)
constexpr float FLOATS_UNIT = 256;
#else
constexpr float FLOATS_UNIT = 1;
#endif
inline Numbers from_floats(const uint8_t* p, int i) {
#if defined(QUIRE_BF16_PAIRS) && defined(__AVX512BF16__)
  // Sign, exponent and mantissa where bfloat16 has them, and the exponent more by 120; below 2^-6 by a table.
  static constexpr uint16_t SMALL[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  __m512i size = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  __m512i large = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
  __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
  __m512i value = _mm512_mask_permutexvar_epi16(large, small, size, _mm512_loadu_si512(SMALL));
  // value | (code << 8 & the sign)
  return (U)_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(code, 8), _mm512_set1_epi16(-0x8000), 0xf8);
#elif defined(__F16C__)
  // Where float16 has them: its exponents mean 2^8 more, and what is below 2^-6 comes out right too.
  U16 both = lanes<U16>(p);
  U16 bits = i ? (both & 0x8000) | (both >> 1 & 0x3f80) : (both & 0x80) << 8 | (both & 0x7f) << 7;
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)bits);
#else
  return (F)_mm256_cvtph_ps((__m128i)bits);
#endif
#else
  U both = spread(lanes<U16>(p));
  auto one = [&](int i) -> F {
    U code = both >> (8 * i), size = code & 0x7fu;
    F small = __builtin_convertvector((I)size, F) * 0.001953125f;  // 2^-9
    U bits = size < 8u ? (U)small : (size << 20) + (120u << 23);
    return (F)(bits | (code & 0x80u) << 24);
  };
  return made(one, i);
#endif
}

// Float16 as floats.
inline F load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  // Subnormals by their own rule: as bits of a float they would be subnormal too, which XLA's threads take for zero.
  U wide = spread(lanes<U16>(p)), size = wide & 0x7fffu;
  F small = __builtin_convertvector((I)size, F) * 5.9604644775390625e-8f;  // 2^-24
  U bits = size < 0x400u ? (U)small : (size << 13) + (112u << 23);
  return (F)(bits | (wide & 0x8000u) << 16);
#endif
}

// The i-th STEP of the eight codes of four bits in each lane.
#if defined(QUIRE_BF16_PAIRS)
// By a table of bfloat16.
typedef uint16_t Entry;
constexpr Entry entry(uint16_t bits) { return bits; }
inline Numbers look_up(U v, int i, const Entry (&table)[16]) {
#if defined(__aarch64__)
  U twice = v >> (4 * i) << 1 & 0x001e001eu;
  U places = twice | twice << 8 | 0x01000100u;  // of an entry's two bytes
  return (U)vqtbl2q_u8(vld1q_u8_x2(reinterpret_cast<const uint8_t*>(table)), (uint8x16_t)places);
#else
  __m256i once = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
  __m512i twice = _mm512_broadcast_i64x4(once);  // the lookup sees five bits, and the fifth is the next weight's
  return (U)_mm512_permutexvar_epi16((__m512i)(v >> (4 * i)), twice);
#endif
}
#else
// How far to shift right, for code i to be the lowest.
constexpr int place(int i) { return 16 * (i % 2) + i / 2 * 4; }
// By a table of float32.
typedef uint32_t Entry;
constexpr Entry entry(uint16_t bits) { return Entry{bits} << 16; }
inline Numbers look_up(U v, int i, const Entry (&table)[16]) {
  v >>= place(i);
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_epi32((__m512i)v, _mm512_loadu_si512(table));  // the lookup sees four bits
#elif defined(__AVX2__)
  // It sees three bits; the fourth says which of two it is.
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(table)), (__m256i)v);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(table) + 8), (__m256i)v);
  return (F)_mm256_blendv_ps(low, high, (__m256)(v << 28));
#else
  for (int lane = 0; lane < W; ++lane) v[lane] = table[v[lane] & 15];
  return (F)v;
#endif
}
#endif

// Four bits that count, from 0 to 15: as u - 8 where a table makes them, else 128 + u, which is u with an exponent set.
struct Counts {
  static constexpr float MIDDLE = 8;
#if defined(__AVX512F__)
  static constexpr float MADE = -8;
  static Numbers unpack(U v, int i) {
    static constexpr Entry TABLE[16] = {
        entry(0xc100), entry(0xc0e0), entry(0xc0c0), entry(0xc0a0), entry(0xc080), entry(0xc040),
        entry(0xc000), entry(0xbf80), entry(0x0000), entry(0x3f80), entry(0x4000), entry(0x4040),
        entry(0x4080), entry(0x40a0), entry(0x40c0), entry(0x40e0)};
    return look_up(v, i, TABLE);
  }
#else
  static constexpr float MADE = 128;
  static Numbers unpack(U v, int i) {
    if (STEP == 2) return (Numbers)((v >> (4 * i) & 0x000f000fu) | 0x43004300u);
    v = i % 2 ? v >> (i / 2 * 4) : v << (16 - i / 2 * 4);
    return (Numbers)((v & 0x000f0000u) | 0x43000000u);
  }
#endif
};

// Floats of four bits, E2M1.
struct Floats {
  static constexpr float MADE = 0, MIDDLE = 0;
  static Numbers unpack(U v, int i) {
    static constexpr Entry TABLE[16] = {
        entry(0x0000), entry(0x3f00), entry(0x3f80), entry(0x3fc0), entry(0x4000), entry(0x4040),
        entry(0x4080), entry(0x40c0), entry(0x8000), entry(0xbf00), entry(0xbf80), entry(0xbfc0),
        entry(0xc000), entry(0xc040), entry(0xc080), entry(0xc0c0)};
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The lookup sees three bits; the fourth is the sign.
    __m256 size = _mm256_permutevar8x32_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(TABLE)), (__m256i)(v >> place(i)));
    return (F)((U)size | (v << (28 - place(i)) & 0x80000000u));
#else
    return look_up(v, i, TABLE);
#endif
  }
};

// Quantiles of the normal distribution, NF4; to bfloat16 where rows are.
inline constexpr Entry NORMALS[16] = {
#if defined(QUIRE_FLOAT_ROWS)
    0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0, 0xbe91a24d, 0xbe3d353f, 0xbdba7871, 0x00000000,
    0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a, 0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000};
#else
    entry(0xbf80), entry(0xbf32), entry(0xbf06), entry(0xbeca), entry(0xbe92), entry(0xbe3d),
    entry(0xbdba), entry(0x0000), entry(0x3da3), entry(0x3e25), entry(0x3e7c), entry(0x3ead),
    entry(0x3ee2), entry(0x3f10), entry(0x3f39), entry(0x3f80)};
#endif
// Numbers from -127 to 113 with steps that grow, of GGUF's IQ4.
inline constexpr Entry STEPS[16] = {
    entry(0xc2fe), entry(0xc2d0), entry(0xc2a6), entry(0xc282), entry(0xc244), entry(0xc20c),
    entry(0xc1b0), entry(0xc120), entry(0x3f80), entry(0x4150), entry(0x41c8), entry(0x4218),
    entry(0x4254), entry(0x428a), entry(0x42b2), entry(0x42e2)};
// Floats of four bits in twelfths of the largest, of bitsandbytes' FP4.
inline constexpr Entry TWELFTHS[16] = {
    entry(0x0000), entry(0x3d80), entry(0x4100), entry(0x4140), entry(0x4080), entry(0x40c0),
    entry(0x4000), entry(0x4040), entry(0x0000), entry(0xbd80), entry(0xc100), entry(0xc140),
    entry(0xc080), entry(0xc0c0), entry(0xc000), entry(0xc040)};

// The numbers of a table.
template <const Entry (&TABLE)[16]>
struct Tabled {
  static constexpr float MADE = 0, MIDDLE = 0;
  static Numbers unpack(U v, int i) { return look_up(v, i, TABLE); }
};

struct Signed {
  static constexpr float UNIT = 1;
  static Numbers unpack(const uint8_t* p, int i) { return from_bytes(reinterpret_cast<const int8_t*>(p), i); }
};
struct Floats8 {
  static constexpr float UNIT = FLOATS_UNIT;
  static Numbers unpack(const uint8_t* p, int i) { return from_floats(p, i); }
};

// How codes lie. What `part` makes of one is MADE more than it stands for, in parts of UNIT; and it stands for MIDDLE less
// where nothing is said to be taken off.
template <typename Code>
struct Nibbles : Code {
  using Word = uint32_t;
  static constexpr int64_t WORD = 8, BITS = 4;
  static constexpr int FULL = ROWS;
  static constexpr bool WIDENS = FEW_REGISTERS && STEP == 1;
  static constexpr float UNIT = 1;
  static Numbers part(const Word* w, int64_t at, int h, int i) {
    return Code::unpack(lanes<U>(w + at / 8 * LANES + h * W), i);
  }
};

template <typename Code>
struct Bytes : Code {
  using Word = uint8_t;
  static constexpr int64_t WORD = 2, BITS = 8;
  static constexpr int FULL = ROWS;
  static constexpr bool WIDENS = STEP == 1;  // making numbers of them costs more than reading floats again
  static constexpr float MADE = 0, MIDDLE = 0;
  static Numbers part(const Word* w, int64_t at, int h, int i) { return Code::unpack(w + at * LANES + 2 * h * W, i); }
};

// Six bits that count, sixteen inputs in three words. The even inputs lie in the low halves and the odd ones in the high:
//
//   bits   0-5      6-11     12-15
//          k0  k1   k2  k3   k12 k13, their low four
//          k4  k5   k6  k7   k14 k15, their low four
//          k8  k9   k10 k11  the high two of k12 k13, then of k14 k15
//
// They become 128 + u: a bfloat16 holds it, and it is u with an exponent set.
struct Sixes {
  using Word = uint32_t;
  static constexpr int64_t WORD = 16, BITS = 6;
  static constexpr int FULL = (ROWS + 2) / 3;  // making numbers of them takes registers too
  static constexpr bool WIDENS = STEP == 1;
  static constexpr float UNIT = 1, MADE = 128, MIDDLE = 32;

  static U moved(U v, int left) { return left < 0 ? v >> -left : v << left; }
  static Numbers part(const Word* w, int64_t at, int h, int i) {
    constexpr uint32_t EACH = STEP == 2 ? 0x00010001 : 0x00010000;  // where a number ends: a float's is the high half
    const int pair = STEP == 2 ? i : i / 2, up = STEP == 2 || i % 2 ? 0 : 16;
    auto bits = [&](int word, int from, uint32_t mask, int to) {
      return moved(lanes<U>(w + ((at >> 4) * 3 + word) * LANES + h * W), up + to - from) & (mask << to) * EACH;
    };
    if (pair < 6) return (Numbers)(bits(pair / 2, pair % 2 * 6, 63, 0) | 0x4300 * EACH);
    return (Numbers)(bits(pair - 6, 12, 15, 0) | bits(2, 2 * pair, 3, 4) | 0x4300 * EACH);
  }
};

// Five bits that count, 32 inputs in five words. The even inputs lie in the low halves and the odd ones in the high: three
// of each in the lowest bits of a word, k0 to k5 in the first, and the highest bit of word i is bit i of k30 and k31.
struct Fives {
  using Word = uint32_t;
  static constexpr int64_t WORD = 32, BITS = 5;
  static constexpr int FULL = ROWS;
  static constexpr bool WIDENS = STEP == 1;
  static constexpr float UNIT = 1, MIDDLE = 16;
#if defined(QUIRE_BF16_PAIRS) && defined(__AVX512F__)
  static constexpr float MADE = -16;
  // By a table of bfloat16; the lookup sees five bits.
  static Numbers number(U v) {
    alignas(64) static constexpr uint16_t TABLE[32] = {
        0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0,
        0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return (U)_mm512_permutexvar_epi16((__m512i)v, _mm512_load_si512(TABLE));
  }
#else
  static constexpr float MADE = 128;  // u with an exponent set
  static Numbers number(U v) {
    constexpr uint32_t EACH = STEP == 2 ? 0x00010001 : 0x00010000;
    return (Numbers)((v & 31 * EACH) | 0x4300 * EACH);
  }
#endif

  static Numbers part(const Word* w, int64_t at, int h, int i) {
    const int pair = STEP == 2 ? i : i / 2, up = STEP == 2 || i % 2 ? 0 : 16;
    auto word = [&](int n) { return lanes<U>(w + ((at >> 5) * 5 + n) * LANES + h * W); };
    if (pair < 15) {
      const int right = pair % 3 * 5 - up;
      return number(right < 0 ? word(pair / 3) << -right : word(pair / 3) >> right);
    }
    U last{};
    UNROLL for (int n = 0; n < 5; ++n) last |= word(n) >> (15 - n) & 0x00010001u << n;
    return number(last << up);
  }
};

// What the groups of an output share, [O / 16, K / group, 16]: how it is kept. `shared` gives it of lanes of a group.
struct Single {
  static int64_t together(int64_t groups) { return groups; }
  F above(int64_t, int) const { return F{}; }
};
struct Wide : Single {
  using Each = float;
  const Each* each;
  explicit Wide(const Each* each) : each(each) {}
  F shared(int64_t at, F) const { return lanes<F>(each + at); }
};
struct Float16 : Single {
  using Each = uint16_t;
  const Each* each;
  explicit Float16(const Each* each) : each(each) {}
  F shared(int64_t at, F) const { return load_half(each + at); }
};
struct Exponent : Single {  // 127 + that of a power of two
  using Each = uint8_t;
  const Each* each;
  explicit Exponent(const Each* each) : each(each) {}
  F shared(int64_t at, F) const { return (F)(__builtin_convertvector(lanes<U8>(each + at), U) << 23); }
};
// A whole number times a float16 that SUPER inputs share, [O / 16, K / SUPER, 16].
struct Levels {
  using Each = int8_t;
  static constexpr int64_t SUPER = 256;
  const Each* each;
  const uint16_t* super;
  int64_t groups;  // of SUPER inputs
  int64_t together(int64_t) const { return groups; }
  F above(int64_t place, int h) const { return load_half(super + place * LANES + h * W); }
  F shared(int64_t at, F above) const {
    return load_bytes(each + at) * above;  // exact
  }
};

// What group `g` shares with its neighbours, read at the first of them; and what follows is fetched.
template <int N, typename Scale>
__attribute__((always_inline)) inline void read_above(const Panel& panel, int64_t groups, int64_t g, const Scale& scale, const Scale& least,
                F (&above)[N][H], F (&least_above)[N][H]) {
  UNROLL for (int n = 0; n < N; ++n) {
    int64_t next = ((panel.block[n] + panel.then[n]) * groups + g) * LANES;
    fetch(scale.each + next);
    if (least.each) fetch(least.each + next);
  }
  int64_t together = scale.together(groups);
  if (g % together) return;
  UNROLL for (int n = 0; n < N; ++n)
    UNROLL for (int h = 0; h < H; ++h) {
      int64_t place = (panel.block[n] * groups + g) / together;
      above[n][h] = scale.above(place, h);
      if (least.each) least_above[n][h] = least.above(place, h);
    }
}

// Codes under rows of bfloat16; every `group` inputs of an output share a scale, and perhaps a zero of the codes or what
// is taken off the product of code and scale.
template <typename Codes, typename Scale>
struct Grouped {
  using X = Half;
  static constexpr bool NARROW = NARROW_ROWS;
  static constexpr int64_t BITS = Codes::BITS;
  static constexpr bool WIDENS = Codes::WIDENS;
  static constexpr bool TILES = false;
  static constexpr int64_t WORD = Codes::WORD, GROUP = STEP;
  static constexpr int MOST = MANY, FULL = Codes::FULL;
  static constexpr float REST = Codes::MADE + Codes::MIDDLE;  // to be taken off where nothing else is said to be
  using Word = typename Codes::Word;
  const Word* w;
  Scale scale, least;   // the second is null where nothing is taken off
  const float* x_sum;   // [T, K / group]; null where nothing at all is to be taken off
  int64_t group;
  const uint8_t* zero = nullptr;  // [O / 16, K / group, 16], or null

  Numbers part(int64_t block, int64_t K, int64_t k, int h, int i) const { return Codes::part(w, block * K + k, h, i); }

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool WIDE>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    int64_t groups = K / group;
    std::memset(out, 0, sizeof(out));
    F above[N][H], least_above[N][H];
    for (int64_t g = 0; g < groups; ++g) {
      read_above(panel, groups, g, scale, least, above, least_above);
      F sum[R][N][H] = {};
      for (int64_t k = g * group; k < (g + 1) * group; k += WORD) {
        if constexpr (room(R * N * H)) fetch_next<N, WORD>(*this, panel, K, k);
        add_word<WIDE>(*this, x + row * K, K, k, panel, sum);
      }
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          int64_t at = (panel.block[n] * groups + g) * LANES + h * W;
          F s = scale.shared(at, above[n][h]) * Codes::UNIT, off = REST * s;
          if (least.each) off = Codes::MADE * s + least.shared(at, least_above[n][h]);
          if (zero) off = (Codes::MADE + load_bytes(zero + at)) * s;
          UNROLL for (int r = 0; r < R; ++r) {
            out[r][n][h] += s * sum[r][n][h];
            if (REST != 0 || x_sum) out[r][n][h] -= off * x_sum[(row + r) * groups + g];
          }
        }
      asm volatile("" ::"r"(out) : "memory");  // the whole sums wait in memory: registers are for a group's
    }
  }
};

}  // namespace quire
