// Group-quantised weights with integer rows. Rows are quantised in the same groups of inputs as the weights: the
// products of a group are summed as integers, and both scales are applied once. A row's values take one byte each (int8
// activations), or two bytes that are multiplied and summed separately, as two "planes". int16 rows lose less precision
// than bfloat16 rows, and with VNNI they take half the instructions of float32 FMAs. At the end are the formats that
// kernels are compiled for.
#pragma once

#include <vector>

#include "formats.h"

namespace quire {

// acc + the products of eight weight bytes per lane, unsigned and at most MAX_BYTE, with eight signed bytes above -128.
template <int MAX_BYTE>
inline I dot_u8s8x8(I acc, U low, U high, const int8_t* x) {
  uint32_t x_low, x_high;
  std::memcpy(&x_low, x, 4);
  std::memcpy(&x_high, x + 4, 4);
#if defined(__AVX512VNNI__)
  acc = (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)low, _mm512_set1_epi32(x_low));
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)high, _mm512_set1_epi32(x_high));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  acc = (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)low, (int8x16_t)vdupq_n_u32(x_low));
  return (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)high, (int8x16_t)vdupq_n_u32(x_high));
#elif defined(__ARM_FEATURE_DOTPROD)
  auto add = [&](U bytes, uint32_t x4) {
    U remainder = bytes;
    if constexpr (MAX_BYTE > 127) {  // too large for signed bytes: two halves are added
      U half = bytes >> 1 & 0x7f7f7f7fu;
      acc = dot_signed(acc, half, x4);
      remainder -= half;
    }
    acc = dot_signed(acc, remainder, x4);
  };
  add(low, x_low);
  add(high, x_high);
  return acc;
#elif defined(__x86_64__)
#if defined(__AVX2__)
  if constexpr (4 * MAX_BYTE * 127 < 32768) {  // the sum of four products fits into int16
#if defined(__AVX512F__)
    I16 low_sums = (I16)_mm512_maddubs_epi16((__m512i)low, _mm512_set1_epi32(x_low));
    I16 high_sums = (I16)_mm512_maddubs_epi16((__m512i)high, _mm512_set1_epi32(x_high));
#else
    I16 low_sums = (I16)_mm256_maddubs_epi16((__m256i)low, _mm256_set1_epi32(x_low));
    I16 high_sums = (I16)_mm256_maddubs_epi16((__m256i)high, _mm256_set1_epi32(x_high));
#endif
    return acc + madd_i16(low_sums + high_sums, I16{} + 1);
  }
#endif
  auto add = [&](U bytes, uint32_t x4) {
    I16 x16 = (I16)(U{} + x4);
    acc += madd_i16((I16)(bytes & 0x00ff00ffu), x16 << 8 >> 8);
    acc += madd_i16((I16)(bytes >> 8 & 0x00ff00ffu), x16 >> 8);
  };
  add(low, x_low);
  add(high, x_high);
  return acc;
#else
  for (int i = 0; i < 4; ++i) acc += (I)(low >> (8 * i) & 0xffu) * x[i] + (I)(high >> (8 * i) & 0xffu) * x[4 + i];
  return acc;
#endif
}

// Replaces each byte, which must be below 16, by its entry in a table.
inline U look_up_bytes(U bytes, const uint8_t (&table)[16]) {
#if defined(__AVX512F__)
  __m128i table128 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table128), (__m512i)bytes);
#elif defined(__AVX2__)
  __m128i table128 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table128), (__m256i)bytes);
#elif defined(__aarch64__)
  return (U)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)bytes);
#else
  uint8_t array[4 * W];
  std::memcpy(array, &bytes, sizeof(array));
  for (uint8_t& byte : array) byte = table[byte];
  return load_as<U>(array);
#endif
}

// Unpacking of codes to unsigned bytes. `unpack(w, h, i)` gives the i-th four of WORD_INPUTS inputs, which are the
// inputs ORDER[4 * i] to ORDER[4 * i + 3]; `w` are the words of these inputs. A byte is value / UNIT + OFFSET. MIDPOINT
// is the implicit zero point, see formats.h. MAX_BYTE is the largest byte.

// Eight 4-bit codes in a word; `Code::to_bytes` converts codes, each in a byte of its own.
template <typename Code>
struct Packed4Bytes {
  using Word = uint32_t;
  static constexpr int64_t WORD_INPUTS = 8, BITS = 4;
  static constexpr uint8_t ORDER[WORD_INPUTS] = {0, 4, 1, 5, 2, 6, 3, 7};
  static U unpack(const Word* w, int h, int i) {
    return Code::to_bytes(load_as<U>(w + h * W) >> (4 * i) & 0x0f0f0f0fu);
  }
};
struct Unsigned4Bytes : Packed4Bytes<Unsigned4Bytes> {
  static constexpr int MAX_BYTE = 15, OFFSET = 0, MIDPOINT = 8;
  static constexpr float UNIT = 1;
  static U to_bytes(U codes) { return codes; }
};
struct E2m1Bytes : Packed4Bytes<E2m1Bytes> {
  static constexpr int MAX_BYTE = 24, OFFSET = 12, MIDPOINT = 0;
  static constexpr float UNIT = 0.5f;
  static U to_bytes(U codes) {
    static constexpr uint8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return look_up_bytes(codes, TABLE);
  }
};
struct Iq4Bytes : Packed4Bytes<Iq4Bytes> {
  static constexpr int MAX_BYTE = 240, OFFSET = 127, MIDPOINT = 0;
  static constexpr float UNIT = 1;
  static U to_bytes(U codes) {
    static constexpr uint8_t TABLE[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
    return look_up_bytes(codes, TABLE);
  }
};

// The layout of Packed5.
struct Unsigned5Bytes {
  using Word = uint32_t;
  static constexpr int64_t WORD_INPUTS = 32, BITS = 5;
  static constexpr int MAX_BYTE = 31, OFFSET = 0, MIDPOINT = 16;
  static constexpr float UNIT = 1;
  static constexpr uint8_t ORDER[WORD_INPUTS] = {0,  2,  1,  3,  6,  8,  7,  9,  12, 14, 13, 15, 18, 20, 19, 21,
                                                 24, 26, 25, 27, 4,  10, 5,  11, 16, 22, 17, 23, 28, 30, 29, 31};
  static U unpack(const Word* w, int h, int i) {
    asm volatile("" : "+r"(w));  // makes the compiler reload words instead of keeping them in registers
    auto word = [&](int n) { return load_as<U>(w + n * LANES + h * W); };
    if (i < 5) return (word(i) & 0x001f001fu) | (word(i) << 3 & 0x1f001f00u);
    if (i < 7) return (word(2 * i - 10) >> 10 & 0x001f001fu) | (word(2 * i - 9) >> 2 & 0x1f001f00u);
    U bytes = word(4) >> 10 & 0x001f001fu;
    UNROLL for (int n = 0; n < 5; ++n) bytes |= word(n) >> (7 - n) & 0x01000100u << n;
    return bytes;
  }
};

// The layout of Packed6.
struct Unsigned6Bytes {
  using Word = uint32_t;
  static constexpr int64_t WORD_INPUTS = 16, BITS = 6;
  static constexpr int MAX_BYTE = 63, OFFSET = 0, MIDPOINT = 32;
  static constexpr float UNIT = 1;
  static constexpr uint8_t ORDER[WORD_INPUTS] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  static U unpack(const Word* w, int h, int i) {
    auto word = [&](int n) { return load_as<U>(w + n * LANES + h * W); };
    if (i < 3) return (word(i) & 0x003f003fu) | (word(i) << 2 & 0x3f003f00u);
    U low_bits = (word(0) >> 12 & 0x000f000fu) | (word(1) >> 4 & 0x0f000f00u);
    return low_bits | (word(2) >> 8 & 0x00300030u) | (word(2) >> 2 & 0x30003000u);
  }
};

// int8 weights in the layout of Packed8.
struct SignedInt8Bytes {
  using Word = uint8_t;
  static constexpr int64_t WORD_INPUTS = 8, BITS = 8;
  static constexpr int MAX_BYTE = 255, OFFSET = 128, MIDPOINT = 0;
  static constexpr float UNIT = 1;
  static constexpr uint8_t ORDER[WORD_INPUTS] = {0, 1, 2, 3, 4, 5, 6, 7};
  static U unpack(const Word* w, int h, int i) {
    const Word* pairs = w + 4 * i * LANES + 2 * h * W;
    U first = zero_extend(load_as<U16>(pairs));
    U second = zero_extend(load_as<U16>(pairs + 2 * LANES));
    return (first | second << 16) ^ 0x80808080u;
  }
};

// Rows that are quantised in groups of inputs, to integers of PLANES bytes. The bytes of each WORD_INPUTS inputs are in
// the order of the unpacked codes. With two planes, their high bytes come before their low bytes; both are signed.
template <int PLANES>
struct QuantisedRows {
  using X = std::conditional_t<PLANES == 2, uint16_t, int8_t>;
  std::vector<X> values;             // [T, K]
  std::vector<float> scale;          // [T, num_groups]
  std::vector<float> sum;            // [T, num_groups], sums of the dequantised values
  std::vector<int32_t> initial_sum;  // [T, num_groups], start of the sum of products: corrects for offsets of bytes
};

// Group-quantised weights with quantised rows; compare `GroupQuantised`.
template <typename Codes, typename Scale, int NUM_PLANES>
struct GroupQuantisedInt {
  static constexpr int PLANES = NUM_PLANES;
  using Rows = QuantisedRows<PLANES>;
  using X = typename Rows::X;
  using Unpack = Codes;
  static constexpr int64_t BITS = Codes::BITS, WORD_INPUTS = Codes::WORD_INPUTS, ROW_GROUP = WORD_INPUTS;
  static constexpr bool DEQUANTISES = false, SUPPORTS_AMX = false;
  // Bytes of rows take registers too, and each plane has its own accumulators.
  static constexpr int FULL_ROWS = TILE_ROWS / PLANES;
  static constexpr int MAX_ROWS = HAS_FEW_REGISTERS || PLANES == 2 ? TILE_ROWS : MAX_TILE_ROWS;
  static constexpr int MAX_BYTE = Codes::MAX_BYTE, OFFSET = Codes::OFFSET, MIDPOINT = Codes::MIDPOINT;
  using Word = typename Codes::Word;
  static constexpr int64_t WORDS = WORD_INPUTS * BITS / 8 / sizeof(Word);  // of an output, for WORD_INPUTS inputs
  const Word* w;
  Scale scale;
  Scale minimum;  // its values are null if there are none
  const Rows& rows;
  int64_t group_size;
  const uint8_t* zero_point = nullptr;  // [O / 16, num_groups, 16], or null

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool>
  void multiply_tile(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    int64_t num_groups = K / group_size;
    int64_t group_words = group_size / WORD_INPUTS;
    const float* row_scale = rows.scale.data() + row * num_groups;
    const float* row_sum = rows.sum.data() + row * num_groups;
    const int32_t* initial_sum = rows.initial_sum.data() + row * num_groups;
    auto* bytes = reinterpret_cast<const int8_t*>(x + row * K);
    const Word* block_w[N];
    UNROLL for (int n = 0; n < N; ++n) block_w[n] = w + panel.block[n] * (K / WORD_INPUTS) * WORDS * LANES;
    std::memset(out, 0, sizeof(out));
    F super_scale[N][H], super_minimum[N][H];
    for (int64_t g = 0; g < num_groups; ++g) {
      load_super_scales(panel, num_groups, g, scale, minimum, super_scale, super_minimum);
      I acc[PLANES][R][N][H] = {};
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N; ++n)
          UNROLL for (int h = 0; h < H; ++h) acc[PLANES - 1][r][n][h] = I{} + initial_sum[r * num_groups + g];
      for (int64_t word = 0; word < group_words; ++word, bytes += WORD_INPUTS * PLANES * R) {
        if constexpr (can_prefetch(PLANES * R * N * H))
          prefetch_weights<N, WORD_INPUTS>(*this, panel, K, (g * group_words + word) * WORD_INPUTS);
        accumulate_word(block_w, bytes, acc);
        UNROLL for (int n = 0; n < N; ++n) block_w[n] += WORDS * LANES;
      }
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          int64_t index = (panel.block[n] * num_groups + g) * LANES + h * W;
          F group_scale = scale.at(index, super_scale[n][h]) * Codes::UNIT;
          F offset{};
          if (minimum.values) offset = minimum.at(index, super_minimum[n][h]);
          if (zero_point) offset = load_bytes(zero_point + index) * group_scale;
          UNROLL for (int r = 0; r < R; ++r) {
            I sum = acc[PLANES - 1][r][n][h];
            if constexpr (PLANES == 2) sum += acc[0][r][n][h] << 8;
            out[r][n][h] += group_scale * row_scale[r * num_groups + g] * __builtin_convertvector(sum, F);
            if (minimum.values || zero_point) out[r][n][h] -= offset * row_sum[r * num_groups + g];
          }
        }
      asm volatile("" ::"r"(out) : "memory");  // keeps `out` in memory, so that registers are free for `acc`
    }
  }

  // Adds the products of WORD_INPUTS inputs, eight at a time. Recursive for the same reason as in formats.h.
  template <int i = 0, int R, int N>
  static __attribute__((always_inline)) void accumulate_word(const Word* const (&block_w)[N], const int8_t* bytes,
                                                             I (&acc)[PLANES][R][N][H]) {
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int h = 0; h < H; ++h) {
        U low = Codes::unpack(block_w[n], h, 2 * i);
        U high = Codes::unpack(block_w[n], h, 2 * i + 1);
        UNROLL for (int r = 0; r < R; ++r)
          UNROLL for (int plane = 0; plane < PLANES; ++plane)
            acc[plane][r][n][h] = dot_u8s8x8<Codes::MAX_BYTE>(acc[plane][r][n][h], low, high,
                                                              bytes + (r * PLANES + plane) * WORD_INPUTS + 8 * i);
      }
    if constexpr (8 * (i + 1) < WORD_INPUTS) accumulate_word<i + 1>(block_w, bytes, acc);
  }
};

template <typename Format>
constexpr bool quantises_rows = false;
template <typename Codes, typename Scale, int PLANES>
constexpr bool quantises_rows<GroupQuantisedInt<Codes, Scale, PLANES>> = true;

// The formats of kernels. A Bf16RowFormat is for rows that are rounded to bfloat16 at most (not at all with
// QUIRE_FLOAT_ROWS). It uses int16 rows instead if the CPU has VNNI and its bfloat16 dot products are not used.
#if defined(__AVX512VNNI__) && !defined(QUIRE_BF16_PAIRS) && !defined(QUIRE_FLOAT_ROWS)
template <typename Codes, typename ByteCodes, typename Scale>
using Bf16RowFormat = GroupQuantisedInt<ByteCodes, Scale, 2>;
#else
template <typename Codes, typename ByteCodes, typename Scale>
using Bf16RowFormat = GroupQuantised<Codes, Scale>;
#endif

using Int4 = Bf16RowFormat<Packed4<Unsigned4>, Unsigned4Bytes, Float16Scale>;
using Mxfp4 = Bf16RowFormat<Packed4<E2m1>, E2m1Bytes, E8m0Scale>;
using Float4 = Bf16RowFormat<Packed4<E2m1>, E2m1Bytes, Float32Scale>;
using Iq4 = Bf16RowFormat<Packed4<Codebook<IQ4_CODEBOOK>>, Iq4Bytes, Float32Scale>;
using Uint4 = Bf16RowFormat<Packed4<Unsigned4>, Unsigned4Bytes, Float32Scale>;
using Uint5Half = Bf16RowFormat<Packed5, Unsigned5Bytes, Float16Scale>;
using Int8Groups = Bf16RowFormat<Packed8<SignedInt8>, SignedInt8Bytes, Float32Scale>;
using Uint4TwoLevel = Bf16RowFormat<Packed4<Unsigned4>, Unsigned4Bytes, TwoLevelScale>;
using Uint6TwoLevel = Bf16RowFormat<Packed6, Unsigned6Bytes, TwoLevelScale>;
using Iq4TwoLevel = Bf16RowFormat<Packed4<Codebook<IQ4_CODEBOOK>>, Iq4Bytes, TwoLevelScale>;
using Nf4 = GroupQuantised<Packed4<Codebook<NF4_CODEBOOK>>, Float32Scale>;
using Fp4 = GroupQuantised<Packed4<Codebook<FP4_CODEBOOK>>, Float32Scale>;
using Fp8 = GroupQuantised<Packed8<E4m3>, Float32Scale>;

// With int8 activations.
using Int4A8 = GroupQuantisedInt<Unsigned4Bytes, Float16Scale, 1>;
using Mxfp4A8 = GroupQuantisedInt<E2m1Bytes, E8m0Scale, 1>;
using Float4A8 = GroupQuantisedInt<E2m1Bytes, Float32Scale, 1>;
using Iq4A8 = GroupQuantisedInt<Iq4Bytes, Float32Scale, 1>;
using Uint4A8 = GroupQuantisedInt<Unsigned4Bytes, Float32Scale, 1>;
using Uint5HalfA8 = GroupQuantisedInt<Unsigned5Bytes, Float16Scale, 1>;
using Int8GroupsA8 = GroupQuantisedInt<SignedInt8Bytes, Float32Scale, 1>;
using Uint4TwoLevelA8 = GroupQuantisedInt<Unsigned4Bytes, TwoLevelScale, 1>;
using Uint6TwoLevelA8 = GroupQuantisedInt<Unsigned6Bytes, TwoLevelScale, 1>;
using Iq4TwoLevelA8 = GroupQuantisedInt<Iq4Bytes, TwoLevelScale, 1>;

}  // namespace quire
