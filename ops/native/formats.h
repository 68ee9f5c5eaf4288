// Weight formats for y = x W, and their inner loops. A format decodes its weights and multiplies a register tile: R
// rows (tokens) by N blocks of sixteen outputs. Inside a block, inputs follow each other in small groups that one
// vector lane multiplies and adds at once:
//
//   [output / 16][input / group][16 outputs][group]
//
//   float32        group 1
//   bfloat16       group 2    sixteen consecutive vectors are an AMX tile
//   int8           group 4    the same
//   8-bit codes    group 2    int8 or FP8 weights with bfloat16 rows
//   4-bit codes    group 8    a lane's low half holds k0 k2 k4 k6 and its high half k1 k3 k5 k7: int4, MXFP4, NF4
//   6-bit codes    group 16   three words, see Packed6
//   5-bit codes    group 32   five words, see Packed5
//
// The rows of a register tile are interleaved, one group of each row after the other: [input / group][rows][group].
//
// Every format accumulates over the inputs in one fixed order, whatever the number of rows, so products are
// batch-invariant. K is a multiple of 32 (of 64 for int8); weights and rows are padded with zeros.
#pragma once

#include "amx.h"
#include "common.h"

namespace quire {

constexpr int H = VECTORS;  // machine vectors of a block of sixteen outputs

// Register tiles are up to TILE_ROWS rows by TILE_BLOCKS blocks, whose accumulators take 24 of the 32 AVX-512 registers
// or 12 of the 16 AVX2 registers. Tiles of up to MAX_TILE_ROWS rows use half the blocks: if all rows fit into one such
// tile, the weights are streamed from memory behind the arithmetic. With few registers these tiles are used for any
// number of rows, since each decoded weight is multiplied with twice as many rows.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_BLOCKS = 4, MAX_TILE_ROWS = 12;
constexpr bool HAS_FEW_REGISTERS = false;
#else
constexpr int TILE_ROWS = 3, TILE_BLOCKS = 2, MAX_TILE_ROWS = 6;
constexpr bool HAS_FEW_REGISTERS = true;
#endif

// Prefetches a cache line into the second-level cache. This costs nothing if the line is already on its way. Inline
// assembly, since GCC removes calls of functions that only prefetch.
inline void prefetch_l2(const void* address) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(address)));
#elif defined(__aarch64__)
  asm volatile("prfm pldl2keep, %0" : : "Q"(*static_cast<const char*>(address)));
#else
  __builtin_prefetch(address, 0, 2);
#endif
}

// The blocks of a weight that a register tile multiplies.
struct Panel {
  int64_t block[TILE_BLOCKS];
  int64_t prefetch_distance[TILE_BLOCKS];  // in blocks, from block[n] to the one to prefetch; 0: no prefetch
  const float* dequantised;                // the same weights as float32, [block][input][16 outputs]; or null
};

// Whether a tile with this many accumulators leaves registers for prefetch addresses, besides those for decoding.
constexpr bool can_prefetch(int num_accumulators) { return num_accumulators <= 12; }

// Prefetches the weights of inputs k to k + INPUTS of the blocks that are `prefetch_distance` ahead of the panel's.
template <int N, int64_t INPUTS, typename Format>
__attribute__((always_inline)) inline void prefetch_weights(const Format& f, const Panel& panel, int64_t K, int64_t k) {
  constexpr int64_t BYTES = LANES * Format::BITS / 8;  // per input of a block
  auto* w = reinterpret_cast<const char*>(f.w);
  UNROLL for (int n = 0; n < N; ++n)
    UNROLL for (int64_t line = 0; line < INPUTS * BYTES; line += 64)
      prefetch_l2(w + ((panel.block[n] + panel.prefetch_distance[n]) * K + k) * BYTES + line);
}

// Rows that are multiplied with weights of bfloat16 or of fewer bits are rounded to bfloat16. A RowValue is a bfloat16
// where the CPU multiplies bfloat16 pairs, else a float. With QUIRE_FLOAT_ROWS rows are floats and are not rounded.
#if defined(QUIRE_FLOAT_ROWS)
constexpr bool ROUND_ROWS = false;
#else
constexpr bool ROUND_ROWS = true;
#endif
#if defined(QUIRE_BF16_PAIRS)
typedef uint16_t RowValue;
#else
typedef float RowValue;
#endif
inline float to_float(uint16_t x) { return bf16_to_float(x); }
inline float to_float(float x) { return x; }

// `Weights` is a vector of decoded weights, DOT_INPUTS consecutive inputs of each output: pairs of bfloat16 or floats.
// `dot` adds their products with DOT_INPUTS values of a row.
#if defined(QUIRE_BF16_PAIRS)
constexpr int DOT_INPUTS = 2;
typedef U Weights;

inline F dot(F acc, Weights w, const RowValue* x) {
#if defined(__aarch64__)
  return dot_bf16_pair(acc, w, x);
#else
  // Inline assembly with a broadcast from memory: the compiler would keep the pairs of all rows in registers.
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const uint16_t(*)[2]>(x)));
  return acc;
#endif
}
inline Weights weights_from_bf16(U pair, int) { return pair; }

// Weights from floats that bfloat16 represents exactly: `decode(i)` gives input i of the pair.
template <typename Decode>
__attribute__((always_inline)) inline Weights weights_from_floats(const Decode& decode, int) {
  return (U)decode(0) >> 16 | ((U)decode(1) & 0xffff0000u);
}
#else
constexpr int DOT_INPUTS = 1;
typedef F Weights;

inline F dot(F acc, Weights w, const RowValue* x) {
#if defined(QUIRE_FLOAT_ROWS) && defined(__AVX512F__)
  // Intrinsics, since float32 products are inexact: whether FMA is used must not depend on how a loop is compiled.
  return (F)_mm512_fmadd_ps((__m512)w, _mm512_set1_ps(x[0]), (__m512)acc);
#elif defined(QUIRE_FLOAT_ROWS) && defined(__AVX2__) && defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)w, _mm256_set1_ps(x[0]), (__m256)acc);
#elif defined(QUIRE_FLOAT_ROWS) && defined(__aarch64__)
  return (F)vfmaq_n_f32((float32x4_t)acc, (float32x4_t)w, x[0]);
#else
  return acc + w * to_float(x[0]);
#endif
}

// Input i (0 or 1) of pairs of bfloat16.
inline Weights weights_from_bf16(U pair, int i) { return (F)(i ? pair & 0xffff0000u : pair << 16); }

// Input i of a pair of floats.
template <typename Decode>
__attribute__((always_inline)) inline Weights weights_from_floats(const Decode& decode, int i) {
  return decode(i);
}
#endif

// `dot` for tiles whose accumulators take most registers. Inline assembly for AVX2 keeps each accumulator in its
// register: the compiler would swap them with weights and spill some.
inline F dot_in_place(F acc, Weights w, const RowValue* x) {
#if defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(_mm256_broadcast_ss(x)));
  return acc;
#else
  return dot(acc, w, x);
#endif
}

// The inputs that one call of `accumulate_word` multiplies: a word's, or a few dequantised ones, which need no unrolling
// by words and compile in a fraction of the time.
template <typename Format, bool DEQUANTISED>
constexpr int64_t word_inputs() {
  return DEQUANTISED && Format::WORD_INPUTS > 8 ? 8 : Format::WORD_INPUTS;
}

// Adds the products of the inputs of a word from k on to the accumulators, one step of DOT_INPUTS after the other for
// all outputs, so that only one value of each row is in a register. Recursive, since the compiler unrolls a loop whose
// iterations differ much too late to keep accumulators in registers.
template <bool DEQUANTISED, int i = 0, typename Format, int R, int N>
__attribute__((always_inline)) inline void accumulate_word(const Format& f, const RowValue* x, int64_t K, int64_t k,
                                                           const Panel& panel, F (&acc)[R][N][H]) {
  auto weight = [&](int n, int h) -> Weights {
    if constexpr (DEQUANTISED)
      return load_as<Weights>(panel.dequantised + (n * K + k + i) * LANES + h * W);
    else
      return f.decode(panel.block[n], K, k, h, i);
  };
  auto row = [&](int r) { return x + (k + i * DOT_INPUTS) * R + r * DOT_INPUTS; };
  if constexpr (DOT_INPUTS == 1 && N * H < R) {
    Weights w[N][H];
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int h = 0; h < H; ++h) w[n][h] = weight(n, h);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) acc[r][n][h] = dot_in_place(acc[r][n][h], w[n][h], row(r));
  } else {
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int h = 0; h < H; ++h) {
        Weights w = weight(n, h);
        UNROLL for (int r = 0; r < R; ++r) acc[r][n][h] = dot(acc[r][n][h], w, row(r));
      }
  }
  if constexpr (i + 1 < word_inputs<Format, DEQUANTISED>() / DOT_INPUTS)
    accumulate_word<DEQUANTISED, i + 1>(f, x, K, k, panel, acc);
}

// Dequantises a block of weights to float32, [input][16 outputs].
template <typename Format>
void dequantise_block(const Format& f, int64_t block, int64_t K, float* out) {
  for (int64_t k = 0; k < K; k += Format::WORD_INPUTS)
    UNROLL for (int i = 0; i < Format::WORD_INPUTS; ++i)
      UNROLL for (int h = 0; h < H; ++h) {
        Weights w = f.decode(block, K, k, h, i);
        std::memcpy(out + (k + i) * LANES + h * W, &w, sizeof(w));
      }
}

// dot_i8x4: acc + the products of four int8 weights per lane with four int8 values of a row. Row values are stored plus
// INT8_ROW_OFFSET, since VNNI multiplies unsigned by signed bytes.
#if defined(__AVX512VNNI__) && !defined(QUIRE_AMX)
constexpr int INT8_ROW_OFFSET = 128;

inline I dot_i8x4(I acc, U w, const uint8_t* x) {
  int32_t x4;
  std::memcpy(&x4, x, 4);
  return (I)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(x4), (__m512i)w);
}
#else
constexpr int INT8_ROW_OFFSET = 0;

#if defined(__ARM_FEATURE_DOTPROD)
inline I dot_signed(I acc, U w, uint32_t x4) {
  return (I)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)vdupq_n_u32(x4));
}

inline I dot_i8x4(I acc, U w, const uint8_t* x) {
  uint32_t x4;
  std::memcpy(&x4, x, 4);
  return dot_signed(acc, w, x4);
}
#elif defined(__x86_64__)
typedef int16_t I16 __attribute__((vector_size(4 * W)));

// The products of int16 pairs, added within each pair.
inline I madd_i16(I16 a, I16 b) {
#if defined(__AVX512F__)
  return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

inline I dot_i8x4(I acc, U w, const uint8_t* x) {
  uint32_t x4;
  std::memcpy(&x4, x, 4);
  I16 w16 = (I16)w;
  I16 x16 = (I16)(U{} + x4);
  acc += madd_i16(w16 << 8 >> 8, x16 << 8 >> 8);
  return acc + madd_i16(w16 >> 8, x16 >> 8);
}
#else
inline I dot_i8x4(I acc, U w, const uint8_t* x) {
  for (int i = 0; i < 4; ++i) acc += ((I)(w << (24 - 8 * i)) >> 24) * static_cast<int8_t>(x[i]);
  return acc;
}
#endif
#endif

// A format has these members: `multiply_tile` computes `out`, the sums of R rows from `row` on and of N blocks of the
// panel; `finish` applies the remaining factors, such as scales, to a row's sums of a block; constants describe the
// format.

// float32 weights and rows.
struct F32 {
  using Weight = float;
  using X = float;                            // type of a row's values
  static constexpr bool ROUNDS_ROWS = false;  // whether rows are rounded to bfloat16
  static constexpr bool DEQUANTISES = false;  // whether panels are dequantised to float32 first for many rows
  static constexpr int64_t BITS = 32;         // per weight
  static constexpr bool SUPPORTS_AMX = false;
  static constexpr int64_t ROW_GROUP = 1;      // consecutive inputs of a row in the interleaved order
  static constexpr int MAX_ROWS = TILE_ROWS;   // rows of the largest register tile
  static constexpr int FULL_ROWS = TILE_ROWS;  // rows above which a tile has half the blocks, to avoid spills
  const float* w;

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool DEQUANTISED>
  void multiply_tile(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    F acc[R][N][H] = {};
    x += row * K;
    for (int64_t k = 0; k < K; ++k) {
      if constexpr (can_prefetch(R * N * H)) prefetch_weights<N, 1>(*this, panel, K, k);
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          F v = load_as<F>(w + (panel.block[n] * K + k) * LANES + h * W);
          UNROLL for (int r = 0; r < R; ++r) acc[r][n][h] += v * x[k * R + r];
        }
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// bfloat16 weights.
struct Bf16 {
  using Weight = uint16_t;
#if defined(QUIRE_AMX)
  using X = uint16_t;
#else
  using X = RowValue;
#endif
  static constexpr bool ROUNDS_ROWS = ROUND_ROWS;
  static constexpr int64_t BITS = 16;
  static constexpr bool DEQUANTISES = false;
  static constexpr bool SUPPORTS_AMX = true;
  static constexpr int64_t WORD_INPUTS = 2, ROW_GROUP = DOT_INPUTS;
  static constexpr int MAX_ROWS = MAX_TILE_ROWS, FULL_ROWS = TILE_ROWS;
  const uint16_t* w;

  Weights decode(int64_t block, int64_t K, int64_t k, int h, int i) const {
    return weights_from_bf16(load_as<U>(w + (block * K + k) * LANES + 2 * h * W), i);
  }

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool DEQUANTISED>
  void multiply_tile(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    F acc[R][N][H] = {};
    for (int64_t k = 0; k < K; k += 2) {
      prefetch_weights<N, 2>(*this, panel, K, k);
      accumulate_word<DEQUANTISED>(*this, x + row * K, K, k, panel, acc);
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// int8 weights with a scale per output, and int8 rows with a scale per row.
struct Int8 {
  using X = uint8_t;
  static constexpr bool DEQUANTISES = false;
  static constexpr int64_t BITS = 8;
  static constexpr bool SUPPORTS_AMX = true;
  static constexpr int64_t ROW_GROUP = 4;
  static constexpr int MAX_ROWS = HAS_FEW_REGISTERS ? TILE_ROWS : MAX_TILE_ROWS;  // a row's bytes take registers too
  static constexpr int FULL_ROWS = TILE_ROWS;
  const int8_t* w;
  const float* scale;         // [O]
  const int32_t* weight_sum;  // [O], sum over the inputs, to correct for INT8_ROW_OFFSET
  const float* row_scale;     // [T]

  // `sum_bits` holds int32 sums.
  f32x16 finish(f32x16 sum_bits, int64_t block, int64_t row) const {
    const int32_t* block_sum = weight_sum + block * LANES;
    f32x16 sum;
    UNROLL for (int h = 0; h < H; ++h)
      sum.vector[h] =
          __builtin_convertvector((I)sum_bits.vector[h] - load_as<I>(block_sum + h * W) * INT8_ROW_OFFSET, F);
    return sum * (load(scale + block * LANES) * row_scale[row]);
  }

  template <int R, int N, bool DEQUANTISED>
  void multiply_tile(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    I acc[R][N][H] = {};
    x += row * K;
    for (int64_t k = 0; k < K; k += 4) {
      prefetch_weights<N, 4>(*this, panel, K, k);
      UNROLL for (int n = 0; n < N; ++n) {
        const int8_t* block_w = w + (panel.block[n] * K + k) * LANES;
        UNROLL for (int h = 0; h < H; ++h) {
          U v = load_as<U>(block_w + 4 * h * W);
          UNROLL for (int r = 0; r < R; ++r) acc[r][n][h] = dot_i8x4(acc[r][n][h], v, x + k * R + 4 * r);
        }
      }
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// Decodes two int8 weights of each output.
inline Weights decode_int8(const int8_t* p, int i) {
#if defined(QUIRE_BF16_PAIRS) && defined(__AVX512BF16__)
  I8 bytes[2];
  std::memcpy(bytes, p, 32);
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes[0]));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes[1]));
  return (U)_mm512_cvtne2ps_pbh(high, low);
#else
  I pair = (I)zero_extend(load_as<U16>(p));
  return weights_from_floats(
      [&](int i) -> F { return __builtin_convertvector((i ? pair << 16 : pair << 24) >> 24, F); }, i);
#endif
}

// int8 weights with a scale per output, and rows that are not quantised; laid out in groups of two inputs.
struct Int8Weights {
  using X = RowValue;
  static constexpr bool ROUNDS_ROWS = ROUND_ROWS;
  static constexpr int64_t BITS = 8;
  static constexpr bool DEQUANTISES = DOT_INPUTS == 1 && !HAS_FEW_REGISTERS;  // else six rows share a decoded weight
  static constexpr bool SUPPORTS_AMX = false;
  static constexpr int64_t WORD_INPUTS = 2, ROW_GROUP = DOT_INPUTS;
  static constexpr int MAX_ROWS = DOT_INPUTS == 1 ? MAX_TILE_ROWS : TILE_ROWS, FULL_ROWS = TILE_ROWS;
  const int8_t* w;
  const float* scale;

  Weights decode(int64_t block, int64_t K, int64_t k, int h, int i) const {
    return decode_int8(w + (block * K + k) * LANES + 2 * h * W, i);
  }

  f32x16 finish(f32x16 sum, int64_t block, int64_t) const { return sum * load(scale + block * LANES); }

  template <int R, int N, bool DEQUANTISED>
  void multiply_tile(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    F acc[R][N][H] = {};
    for (int64_t k = 0; k < K; k += 2) {
      if constexpr (can_prefetch(R * N * H)) prefetch_weights<N, 2>(*this, panel, K, k);
      accumulate_word<DEQUANTISED>(*this, x + row * K, K, k, panel, acc);
    }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// Decodes two FP8 weights (E4M3) of each output, divided by E4M3_UNIT. NaN codes do not occur.
#if defined(__F16C__) && !defined(QUIRE_BF16_PAIRS)
constexpr float E4M3_UNIT = 256;
#else
constexpr float E4M3_UNIT = 1;
#endif
inline Weights decode_e4m3(const uint8_t* p, int i) {
#if defined(QUIRE_BF16_PAIRS) && defined(__AVX512BF16__)
  // Moves sign, exponent and mantissa to their places in bfloat16 and adds 120 to the exponent. Subnormals, which are
  // below 2^-6, come from a table.
  static constexpr uint16_t SUBNORMALS[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
  __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
  __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  __m512i value =
      _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude, _mm512_loadu_si512(SUBNORMALS));
  // value | (code << 8 & sign bits)
  return (U)_mm512_ternarylogic_epi32(value, _mm512_slli_epi16(code, 8), _mm512_set1_epi16(-0x8000), 0xf8);
#elif defined(__F16C__)
  // Moves the fields to their places in float16, whose exponent bias is larger by 8. Subnormals come out right too.
  U16 pair = load_as<U16>(p);
  U16 bits = i ? (pair & 0x8000) | (pair >> 1 & 0x3f80) : (pair & 0x80) << 8 | (pair & 0x7f) << 7;
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)bits);
#else
  return (F)_mm256_cvtph_ps((__m128i)bits);
#endif
#else
  U pair = zero_extend(load_as<U16>(p));
  auto decode = [&](int i) -> F {
    U code = pair >> (8 * i);
    U magnitude = code & 0x7fu;
    F subnormal = __builtin_convertvector((I)magnitude, F) * 0.001953125f;  // 2^-9
    U bits = magnitude < 8u ? (U)subnormal : (magnitude << 20) + (120u << 23);
    return (F)(bits | (code & 0x80u) << 24);
  };
  return weights_from_floats(decode, i);
#endif
}

// float16 to float32.
inline F load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  // Subnormals are converted separately: shifted like the rest they would be subnormal float32, which XLA's threads
  // flush to zero.
  U bits16 = zero_extend(load_as<U16>(p));
  U magnitude = bits16 & 0x7fffu;
  F subnormal = __builtin_convertvector((I)magnitude, F) * 5.9604644775390625e-8f;  // 2^-24
  U bits = magnitude < 0x400u ? (U)subnormal : (magnitude << 13) + (112u << 23);
  return (F)(bits | (bits16 & 0x8000u) << 16);
#endif
}

// look_up_codes: decodes step i of the eight 4-bit codes in each lane by a table of sixteen entries.
#if defined(QUIRE_BF16_PAIRS)
typedef uint16_t TableEntry;  // bfloat16
constexpr TableEntry table_entry(uint16_t bf16_bits) { return bf16_bits; }
inline Weights look_up_codes(U v, int i, const TableEntry (&table)[16]) {
#if defined(__aarch64__)
  U byte_offsets = v >> (4 * i) << 1 & 0x001e001eu;
  U byte_indices = byte_offsets | byte_offsets << 8 | 0x01000100u;  // of an entry's two bytes
  return (U)vqtbl2q_u8(vld1q_u8_x2(reinterpret_cast<const uint8_t*>(table)), (uint8x16_t)byte_indices);
#else
  // The lookup uses five bits, of which the fifth belongs to the next code; so the table is repeated.
  __m256i table16 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
  __m512i table32 = _mm512_broadcast_i64x4(table16);
  return (U)_mm512_permutexvar_epi16((__m512i)(v >> (4 * i)), table32);
#endif
}
#else
// The shift to the right that moves code i to the lowest bits.
constexpr int code_shift(int i) { return 16 * (i % 2) + i / 2 * 4; }
typedef uint32_t TableEntry;  // float32
constexpr TableEntry table_entry(uint16_t bf16_bits) { return TableEntry{bf16_bits} << 16; }
inline Weights look_up_codes(U v, int i, const TableEntry (&table)[16]) {
  v >>= code_shift(i);
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_epi32((__m512i)v, _mm512_loadu_si512(table));  // uses the lowest four bits
#elif defined(__AVX2__)
  // A lookup uses three bits; the fourth selects the half of the table.
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(table)), (__m256i)v);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(table) + 8), (__m256i)v);
  return (F)_mm256_blendv_ps(low, high, (__m256)(v << 28));
#else
  for (int lane = 0; lane < W; ++lane) v[lane] = table[v[lane] & 15];
  return (F)v;
#endif
}
#endif

// Value types of codes. `decode(codes, i)` gives value / UNIT + OFFSET. MIDPOINT is the implicit zero point: it is
// subtracted from the value if the weight has neither zero points nor minimums.

// Some decoders insert a code u below a constant exponent, which makes 128 + u. With rounded rows the offset of 128 is
// subtracted from each group's sum. With float32 rows that would cost the sum four bits, so it is subtracted, together
// with the midpoint, from each weight, which is exact.
constexpr bool SHIFTS_CODES = ROUND_ROWS;
template <typename Codes>
inline Weights from_shifted(Weights shifted) {
  if constexpr (SHIFTS_CODES)
    return shifted;
  else
    return (Weights)((F)shifted - (Codes::MIDPOINT + 128));
}

// Unsigned 4-bit codes u: as u - 8 by a table, or as 128 + u by inserting u below a constant exponent.
struct Unsigned4 {
  static constexpr float MIDPOINT = 8;
#if defined(__AVX512F__)
  static constexpr float OFFSET = -8;
  static Weights decode(U v, int i) {
    static constexpr TableEntry TABLE[16] = {
        table_entry(0xc100), table_entry(0xc0e0), table_entry(0xc0c0), table_entry(0xc0a0),
        table_entry(0xc080), table_entry(0xc040), table_entry(0xc000), table_entry(0xbf80),
        table_entry(0x0000), table_entry(0x3f80), table_entry(0x4000), table_entry(0x4040),
        table_entry(0x4080), table_entry(0x40a0), table_entry(0x40c0), table_entry(0x40e0)};
    return look_up_codes(v, i, TABLE);
  }
#else
  static constexpr float OFFSET = SHIFTS_CODES ? 128 : -MIDPOINT;
  static Weights decode(U v, int i) {
    if (DOT_INPUTS == 2) return (Weights)((v >> (4 * i) & 0x000f000fu) | 0x43004300u);
    v = i % 2 ? v >> (i / 2 * 4) : v << (16 - i / 2 * 4);
    return from_shifted<Unsigned4>((Weights)((v & 0x000f0000u) | 0x43000000u));
  }
#endif
};

// 4-bit floats, E2M1.
struct E2m1 {
  static constexpr float OFFSET = 0, MIDPOINT = 0;
  static Weights decode(U v, int i) {
    static constexpr TableEntry TABLE[16] = {
        table_entry(0x0000), table_entry(0x3f00), table_entry(0x3f80), table_entry(0x3fc0),
        table_entry(0x4000), table_entry(0x4040), table_entry(0x4080), table_entry(0x40c0),
        table_entry(0x8000), table_entry(0xbf00), table_entry(0xbf80), table_entry(0xbfc0),
        table_entry(0xc000), table_entry(0xc040), table_entry(0xc080), table_entry(0xc0c0)};
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The lookup uses three bits; the fourth is the sign.
    __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(TABLE)),
                                                (__m256i)(v >> code_shift(i)));
    return (F)((U)magnitude | (v << (28 - code_shift(i)) & 0x80000000u));
#else
    return look_up_codes(v, i, TABLE);
#endif
  }
};

// bitsandbytes' NF4: quantiles of the normal distribution. They are rounded to bfloat16 where rows are.
inline constexpr TableEntry NF4_CODEBOOK[16] = {
#if defined(QUIRE_FLOAT_ROWS)
    0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0, 0xbe91a24d, 0xbe3d353f, 0xbdba7871, 0x00000000,
    0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a, 0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000};
#else
    table_entry(0xbf80), table_entry(0xbf32), table_entry(0xbf06), table_entry(0xbeca),
    table_entry(0xbe92), table_entry(0xbe3d), table_entry(0xbdba), table_entry(0x0000),
    table_entry(0x3da3), table_entry(0x3e25), table_entry(0x3e7c), table_entry(0x3ead),
    table_entry(0x3ee2), table_entry(0x3f10), table_entry(0x3f39), table_entry(0x3f80)};
#endif
// GGUF's IQ4_NL and IQ4_XS: integers from -127 to 113 with growing steps.
inline constexpr TableEntry IQ4_CODEBOOK[16] = {
    table_entry(0xc2fe), table_entry(0xc2d0), table_entry(0xc2a6), table_entry(0xc282),
    table_entry(0xc244), table_entry(0xc20c), table_entry(0xc1b0), table_entry(0xc120),
    table_entry(0x3f80), table_entry(0x4150), table_entry(0x41c8), table_entry(0x4218),
    table_entry(0x4254), table_entry(0x428a), table_entry(0x42b2), table_entry(0x42e2)};
// bitsandbytes' FP4, times twelve.
inline constexpr TableEntry FP4_CODEBOOK[16] = {
    table_entry(0x0000), table_entry(0x3d80), table_entry(0x4100), table_entry(0x4140),
    table_entry(0x4080), table_entry(0x40c0), table_entry(0x4000), table_entry(0x4040),
    table_entry(0x0000), table_entry(0xbd80), table_entry(0xc100), table_entry(0xc140),
    table_entry(0xc080), table_entry(0xc0c0), table_entry(0xc000), table_entry(0xc040)};

// 4-bit codes that index a codebook.
template <const TableEntry (&TABLE)[16]>
struct Codebook {
  static constexpr float OFFSET = 0, MIDPOINT = 0;
  static Weights decode(U v, int i) { return look_up_codes(v, i, TABLE); }
};

struct SignedInt8 {
  static constexpr float UNIT = 1;
  static Weights decode(const uint8_t* p, int i) { return decode_int8(reinterpret_cast<const int8_t*>(p), i); }
};
struct E4m3 {
  static constexpr float UNIT = E4M3_UNIT;
  static Weights decode(const uint8_t* p, int i) { return decode_e4m3(p, i); }
};

// Packings of codes: WORD_INPUTS inputs share a word or a few words. `decode(w, k, h, i)` decodes step i of the group
// of inputs at k, for the h-th vector of outputs; k counts from the beginning of the weight.

// Eight 4-bit codes in a word.
template <typename Code>
struct Packed4 : Code {
  using Word = uint32_t;
  static constexpr int64_t WORD_INPUTS = 8, BITS = 4;
  static constexpr int FULL_ROWS = TILE_ROWS;
  static constexpr bool DEQUANTISES = HAS_FEW_REGISTERS && DOT_INPUTS == 1;
  static constexpr float UNIT = 1;
  static Weights decode(const Word* w, int64_t k, int h, int i) {
    return Code::decode(load_as<U>(w + k / 8 * LANES + h * W), i);
  }
};

// Bytes, two inputs of each output together.
template <typename Code>
struct Packed8 : Code {
  using Word = uint8_t;
  static constexpr int64_t WORD_INPUTS = 2, BITS = 8;
  static constexpr int FULL_ROWS = TILE_ROWS;
  static constexpr bool DEQUANTISES = DOT_INPUTS == 1;  // decoding costs more than reading float32 again
  static constexpr float OFFSET = 0, MIDPOINT = 0;
  static Weights decode(const Word* w, int64_t k, int h, int i) { return Code::decode(w + k * LANES + 2 * h * W, i); }
};

// Unsigned 6-bit codes, sixteen inputs in three words. Even inputs are in the low halves of words, odd ones in the
// high:
//
//   bits   0-5      6-11     12-15
//          k0  k1   k2  k3   k12 k13, their low four bits
//          k4  k5   k6  k7   k14 k15, their low four bits
//          k8  k9   k10 k11  the high two bits of k12 k13, then of k14 k15
//
// Codes are decoded by `from_shifted`; bfloat16 represents 128 + u exactly.
struct Packed6 {
  using Word = uint32_t;
  static constexpr int64_t WORD_INPUTS = 16, BITS = 6;
  static constexpr int FULL_ROWS = (TILE_ROWS + 2) / 3;  // decoding takes registers too
  static constexpr bool DEQUANTISES = DOT_INPUTS == 1;
  static constexpr float UNIT = 1, MIDPOINT = 32, OFFSET = SHIFTS_CODES ? 128 : -MIDPOINT;

  static U shift_left(U v, int count) { return count < 0 ? v >> -count : v << count; }
  static Weights decode(const Word* w, int64_t k, int h, int i) {
    // 1 at the lowest bit of each bfloat16 of a pair, or of the upper half of a float.
    constexpr uint32_t ONES = DOT_INPUTS == 2 ? 0x00010001 : 0x00010000;
    const int pair = DOT_INPUTS == 2 ? i : i / 2;
    const int half_shift = DOT_INPUTS == 2 || i % 2 ? 0 : 16;
    auto extract = [&](int word, int from_bit, uint32_t mask, int to_bit) {
      return shift_left(load_as<U>(w + ((k >> 4) * 3 + word) * LANES + h * W), half_shift + to_bit - from_bit) &
             (mask << to_bit) * ONES;
    };
    U code = pair < 6 ? extract(pair / 2, pair % 2 * 6, 63, 0)
                      : extract(pair - 6, 12, 15, 0) | extract(2, 2 * pair, 3, 4);
    return from_shifted<Packed6>((Weights)(code | 0x4300 * ONES));
  }
};

// Unsigned 5-bit codes, 32 inputs in five words. Even inputs are in the low halves of words, odd ones in the high. The
// low 15 bits of each half hold three codes, k0 to k5 in the first word. The highest bits of word i's halves are bit i
// of k30 and k31.
struct Packed5 {
  using Word = uint32_t;
  static constexpr int64_t WORD_INPUTS = 32, BITS = 5;
  static constexpr int FULL_ROWS = TILE_ROWS;
  static constexpr bool DEQUANTISES = DOT_INPUTS == 1;
  static constexpr float UNIT = 1, MIDPOINT = 16;
#if defined(QUIRE_BF16_PAIRS) && defined(__AVX512F__)
  static constexpr float OFFSET = -16;
  // The lookup in this table of bfloat16 uses five bits.
  static Weights decode_codes(U v) {
    alignas(64) static constexpr uint16_t TABLE[32] = {
        0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0,
        0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    return (U)_mm512_permutexvar_epi16((__m512i)v, _mm512_load_si512(TABLE));
  }
#else
  static constexpr float OFFSET = SHIFTS_CODES ? 128 : -MIDPOINT;
  static Weights decode_codes(U v) {
    constexpr uint32_t ONES = DOT_INPUTS == 2 ? 0x00010001 : 0x00010000;
    return from_shifted<Packed5>((Weights)((v & 31 * ONES) | 0x4300 * ONES));
  }
#endif

  static Weights decode(const Word* w, int64_t k, int h, int i) {
    const int pair = DOT_INPUTS == 2 ? i : i / 2;
    const int half_shift = DOT_INPUTS == 2 || i % 2 ? 0 : 16;
    auto word = [&](int n) { return load_as<U>(w + ((k >> 5) * 5 + n) * LANES + h * W); };
    if (pair < 15) {
      const int right_shift = pair % 3 * 5 - half_shift;
      return decode_codes(right_shift < 0 ? word(pair / 3) << -right_shift : word(pair / 3) >> right_shift);
    }
    U last_pair{};
    UNROLL for (int n = 0; n < 5; ++n) last_pair |= word(n) >> (15 - n) & 0x00010001u << n;
    return decode_codes(last_pair << half_shift);
  }
};

// Scales (or minimums) of groups of inputs, [O / 16, num_groups, 16]. `at(index, super)` loads one vector of them as
// floats; `super` is the vector that `super_scale` gave, of use only for scales of two levels.
struct OneLevelScale {
  static int64_t groups_per_super_block(int64_t num_groups) { return num_groups; }
  F super_scale(int64_t, int) const { return F{}; }
};
struct Float32Scale : OneLevelScale {
  using Stored = float;
  const Stored* values;
  explicit Float32Scale(const Stored* values) : values(values) {}
  F at(int64_t index, F) const { return load_as<F>(values + index); }
};
struct Float16Scale : OneLevelScale {
  using Stored = uint16_t;
  const Stored* values;
  explicit Float16Scale(const Stored* values) : values(values) {}
  F at(int64_t index, F) const { return load_f16(values + index); }
};
struct E8m0Scale : OneLevelScale {  // the biased exponent of a power of two
  using Stored = uint8_t;
  const Stored* values;
  explicit E8m0Scale(const Stored* values) : values(values) {}
  F at(int64_t index, F) const { return (F)(__builtin_convertvector(load_as<U8>(values + index), U) << 23); }
};
// As in GGUF's K-quants: an int8 per group, times a float16 per super-block of inputs, [O / 16, K / SUPER_BLOCK, 16].
struct TwoLevelScale {
  using Stored = int8_t;
  static constexpr int64_t SUPER_BLOCK = 256;
  const Stored* values;
  const uint16_t* super_scales;
  int64_t groups_per_super;
  int64_t groups_per_super_block(int64_t) const { return groups_per_super; }
  F super_scale(int64_t super_block, int h) const { return load_f16(super_scales + super_block * LANES + h * W); }
  F at(int64_t index, F super) const {
    return load_bytes(values + index) * super;  // exact
  }
};

// Loads the super-scales of group `g` if it is the first of a super-block, and prefetches the next panel's scales.
template <int N, typename Scale>
__attribute__((always_inline)) inline void load_super_scales(const Panel& panel, int64_t num_groups, int64_t g,
                                                             const Scale& scale, const Scale& minimum,
                                                             F (&super_scale)[N][H], F (&super_minimum)[N][H]) {
  UNROLL for (int n = 0; n < N; ++n) {
    int64_t next = ((panel.block[n] + panel.prefetch_distance[n]) * num_groups + g) * LANES;
    prefetch_l2(scale.values + next);
    if (minimum.values) prefetch_l2(minimum.values + next);
  }
  int64_t groups_per_super = scale.groups_per_super_block(num_groups);
  if (g % groups_per_super) return;
  UNROLL for (int n = 0; n < N; ++n)
    UNROLL for (int h = 0; h < H; ++h) {
      int64_t super_block = (panel.block[n] * num_groups + g) / groups_per_super;
      super_scale[n][h] = scale.super_scale(super_block, h);
      if (minimum.values) super_minimum[n][h] = minimum.super_scale(super_block, h);
    }
}

// Group-quantised weights with rows that are not quantised. Every `group_size` inputs of an output share a scale, and
// perhaps a zero point or a minimum: a weight is scale * (code - zero_point) or scale * code - minimum.
template <typename Codes, typename Scale>
struct GroupQuantised {
  using X = RowValue;
  static constexpr bool ROUNDS_ROWS = ROUND_ROWS;
  static constexpr int64_t BITS = Codes::BITS;
  static constexpr bool DEQUANTISES = Codes::DEQUANTISES;
  static constexpr bool SUPPORTS_AMX = false;
  static constexpr int64_t WORD_INPUTS = Codes::WORD_INPUTS, ROW_GROUP = DOT_INPUTS;
  static constexpr int MAX_ROWS = MAX_TILE_ROWS, FULL_ROWS = Codes::FULL_ROWS;
  static constexpr float DEFAULT_OFFSET = Codes::OFFSET + Codes::MIDPOINT;  // without zero points and minimums
  using Word = typename Codes::Word;
  const Word* w;
  Scale scale;
  Scale minimum;         // its values are null if there are none
  const float* row_sum;  // [T, num_groups], sums of rows over groups; null if no offset is to be subtracted
  int64_t group_size;
  const uint8_t* zero_point = nullptr;  // [O / 16, num_groups, 16], or null

  Weights decode(int64_t block, int64_t K, int64_t k, int h, int i) const {
    return Codes::decode(w, block * K + k, h, i);
  }

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool DEQUANTISED>
  void multiply_tile(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    int64_t num_groups = K / group_size;
    std::memset(out, 0, sizeof(out));
    F super_scale[N][H], super_minimum[N][H];
    for (int64_t g = 0; g < num_groups; ++g) {
      load_super_scales(panel, num_groups, g, scale, minimum, super_scale, super_minimum);
      F acc[R][N][H] = {};
      constexpr int64_t STEP = word_inputs<GroupQuantised, DEQUANTISED>();
      for (int64_t k = g * group_size; k < (g + 1) * group_size; k += STEP) {
        if constexpr (can_prefetch(R * N * H)) prefetch_weights<N, STEP>(*this, panel, K, k);
        accumulate_word<DEQUANTISED>(*this, x + row * K, K, k, panel, acc);
      }
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          int64_t index = (panel.block[n] * num_groups + g) * LANES + h * W;
          F group_scale = scale.at(index, super_scale[n][h]) * Codes::UNIT;
          F offset = DEFAULT_OFFSET * group_scale;
          if (minimum.values) offset = Codes::OFFSET * group_scale + minimum.at(index, super_minimum[n][h]);
          if (zero_point) offset = (Codes::OFFSET + load_bytes(zero_point + index)) * group_scale;
          UNROLL for (int r = 0; r < R; ++r) {
            out[r][n][h] += group_scale * acc[r][n][h];
            if (DEFAULT_OFFSET != 0 || row_sum) out[r][n][h] -= offset * row_sum[(row + r) * num_groups + g];
          }
        }
      asm volatile("" ::"r"(out) : "memory");  // keeps `out` in memory, so that registers are free for `acc`
    }
  }
};

}  // namespace quire
