// Products of codes with rows of integers. As codes share a scale in groups of inputs, so do a row's integers: the products
// of a group are added as integers, and both scales are applied once. Rows have one byte an input for int8 activations, or
// two, whose products are added separately (in two "planes"): these lose less than bfloat16, and with VNNI they take half
// the instructions of float32 FMAs.
#pragma once

#include <vector>

#include "formats.h"

namespace quire {

// acc + the products of eight codes a lane, of unsigned bytes up to LARGEST, with eight signed bytes above -128.
template <int LARGEST>
inline I dot_eights(I acc, U low, U high, const int8_t* x) {
  uint32_t first, second;
  std::memcpy(&first, x, 4);
  std::memcpy(&second, x + 4, 4);
#if defined(__AVX512VNNI__)
  acc = (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)low, _mm512_set1_epi32(first));
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)high, _mm512_set1_epi32(second));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  acc = (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)low, (int8x16_t)vdupq_n_u32(first));
  return (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)high, (int8x16_t)vdupq_n_u32(second));
#elif defined(__ARM_FEATURE_DOTPROD)
  auto add = [&](U codes, uint32_t four) {
    U rest = codes;
    if constexpr (LARGEST > 127) {  // too much for signed bytes, and half of it is not
      U half = codes >> 1 & 0x7f7f7f7fu;
      acc = dot_signed(acc, half, four);
      rest -= half;
    }
    acc = dot_signed(acc, rest, four);
  };
  add(low, first);
  add(high, second);
  return acc;
#elif defined(__x86_64__)
#if defined(__AVX2__)
  if constexpr (4 * LARGEST * 127 < 32768) {
#if defined(__AVX512F__)
    Words one = (Words)_mm512_maddubs_epi16((__m512i)low, _mm512_set1_epi32(first));
    Words other = (Words)_mm512_maddubs_epi16((__m512i)high, _mm512_set1_epi32(second));
#else
    Words one = (Words)_mm256_maddubs_epi16((__m256i)low, _mm256_set1_epi32(first));
    Words other = (Words)_mm256_maddubs_epi16((__m256i)high, _mm256_set1_epi32(second));
#endif
    return acc + dot_words(one + other, Words{} + 1);
  }
#endif
  auto add = [&](U codes, uint32_t four) {
    Words xs = (Words)(U{} + four);
    acc += dot_words((Words)(codes & 0x00ff00ffu), xs << 8 >> 8);
    acc += dot_words((Words)(codes >> 8 & 0x00ff00ffu), xs >> 8);
  };
  add(low, first);
  add(high, second);
  return acc;
#else
  for (int i = 0; i < 4; ++i) acc += (I)(low >> (8 * i) & 0xffu) * x[i] + (I)(high >> (8 * i) & 0xffu) * x[4 + i];
  return acc;
#endif
}

// Each byte's entry of a table; bytes are below 16.
inline U look_up_bytes(U bytes, const uint8_t (&table)[16]) {
#if defined(__AVX512F__)
  __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(once), (__m512i)bytes);
#elif defined(__AVX2__)
  __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(once), (__m256i)bytes);
#elif defined(__aarch64__)
  return (U)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)bytes);
#else
  uint8_t each[4 * W];
  std::memcpy(each, &bytes, sizeof(each));
  for (uint8_t& byte : each) byte = table[byte];
  return lanes<U>(each);
#endif
}

// How codes become bytes: WORD inputs of an output lie in some words, and `four` gives their i-th four bytes, which are of the
// inputs ORDER[4 * i] to ORDER[4 * i + 3]. A byte is OFFSET more than the code's value in parts of UNIT; the value of a
// code that counts is MIDDLE less where nothing is said to be taken off.
template <typename Codes>
struct NibbleBytes {
  using Word = uint32_t;
  static constexpr int64_t WORD = 8, BITS = 4;
  static constexpr uint8_t ORDER[WORD] = {0, 4, 1, 5, 2, 6, 3, 7};
  static U four(const Word* w, int h, int i) { return Codes::bytes(lanes<U>(w + h * W) >> (4 * i) & 0x0f0f0f0fu); }
};
struct CountBytes : NibbleBytes<CountBytes> {
  static constexpr int LARGEST = 15, OFFSET = 0, MIDDLE = 8;
  static constexpr float UNIT = 1;
  static U bytes(U codes) { return codes; }
};
struct FloatBytes : NibbleBytes<FloatBytes> {
  static constexpr int LARGEST = 24, OFFSET = 12, MIDDLE = 0;
  static constexpr float UNIT = 0.5f;
  static U bytes(U codes) {
    static constexpr uint8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return look_up_bytes(codes, TABLE);
  }
};
struct StepBytes : NibbleBytes<StepBytes> {
  static constexpr int LARGEST = 240, OFFSET = 127, MIDDLE = 0;
  static constexpr float UNIT = 1;
  static U bytes(U codes) {
    static constexpr uint8_t TABLE[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
    return look_up_bytes(codes, TABLE);
  }
};

// See `Fives` and `Sixes`.
struct FiveBytes {
  using Word = uint32_t;
  static constexpr int64_t WORD = 32, BITS = 5;
  static constexpr int LARGEST = 31, OFFSET = 0, MIDDLE = 16;
  static constexpr float UNIT = 1;
  static constexpr uint8_t ORDER[WORD] = {0,  2,  1,  3,  6,  8,  7,  9,  12, 14, 13, 15, 18, 20, 19, 21,
                                          24, 26, 25, 27, 4,  10, 5,  11, 16, 22, 17, 23, 28, 30, 29, 31};
  static U four(const Word* w, int h, int i) {
    asm volatile("" : "+r"(w));  // words are read again rather than kept in registers, which sums need
    auto word = [&](int n) { return lanes<U>(w + n * LANES + h * W); };
    if (i < 5) return (word(i) & 0x001f001fu) | (word(i) << 3 & 0x1f001f00u);
    if (i < 7) return (word(2 * i - 10) >> 10 & 0x001f001fu) | (word(2 * i - 9) >> 2 & 0x1f001f00u);
    U bytes = word(4) >> 10 & 0x001f001fu;
    UNROLL for (int n = 0; n < 5; ++n) bytes |= word(n) >> (7 - n) & 0x01000100u << n;
    return bytes;
  }
};
struct SixBytes {
  using Word = uint32_t;
  static constexpr int64_t WORD = 16, BITS = 6;
  static constexpr int LARGEST = 63, OFFSET = 0, MIDDLE = 32;
  static constexpr float UNIT = 1;
  static constexpr uint8_t ORDER[WORD] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  static U four(const Word* w, int h, int i) {
    auto word = [&](int n) { return lanes<U>(w + n * LANES + h * W); };
    if (i < 3) return (word(i) & 0x003f003fu) | (word(i) << 2 & 0x3f003f00u);
    U low = (word(0) >> 12 & 0x000f000fu) | (word(1) >> 4 & 0x0f000f00u);
    return low | (word(2) >> 8 & 0x00300030u) | (word(2) >> 2 & 0x30003000u);
  }
};
// Signed bytes, two inputs of each output together.
struct SignedBytes {
  using Word = uint8_t;
  static constexpr int64_t WORD = 8, BITS = 8;
  static constexpr int LARGEST = 255, OFFSET = 128, MIDDLE = 0;
  static constexpr float UNIT = 1;
  static constexpr uint8_t ORDER[WORD] = {0, 1, 2, 3, 4, 5, 6, 7};
  static U four(const Word* w, int h, int i) {
    const Word* at = w + 4 * i * LANES + 2 * h * W;
    U even = spread(lanes<U16>(at)), odd = spread(lanes<U16>(at + 2 * LANES));
    return (even | odd << 16) ^ 0x80808080u;
  }
};

// Rows as integers of PLANES bytes, in the order in which the codes of a word lie, and what each group of them shares. Of
// two bytes an input, WORD inputs' high ones lie before their low ones; both are signed.
template <int PLANES>
struct GroupIntegers {
  using X = std::conditional_t<PLANES == 2, uint16_t, int8_t>;
  std::vector<X> rows;
  std::vector<float> scale, sum;  // [T, K / group]; the sum of the numbers that the integers stand for
  std::vector<int32_t> start;     // the same: what the sum of products starts from, to take off what all codes have more
};

template <typename Codes, typename Scale, int EACH>
struct GroupedIntegers {
  static constexpr int PLANES = EACH;
  using Rows = GroupIntegers<PLANES>;
  using X = typename Rows::X;
  using Order = Codes;
  static constexpr int64_t BITS = Codes::BITS, WORD = Codes::WORD, GROUP = WORD;
  static constexpr bool WIDENS = false, TILES = false;
  // Rows' bytes take registers too, and each plane has its own sums.
  static constexpr int FULL = ROWS / PLANES, MOST = FEW_REGISTERS || PLANES == 2 ? ROWS : MANY;
  static constexpr int LARGEST = Codes::LARGEST, OFFSET = Codes::OFFSET, MIDDLE = Codes::MIDDLE;
  using Word = typename Codes::Word;
  static constexpr int64_t WORDS = WORD * BITS / 8 / sizeof(Word);  // of an output, for WORD inputs
  const Word* w;
  Scale scale, least;
  const Rows& x_shared;
  int64_t group;
  const uint8_t* zero = nullptr;

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    int64_t groups = K / group, words = group / WORD;
    const float *x_scale = x_shared.scale.data() + row * groups, *x_sum = x_shared.sum.data() + row * groups;
    const int32_t* start = x_shared.start.data() + row * groups;
    auto* bytes = reinterpret_cast<const int8_t*>(x + row * K);
    const Word* at[N];
    UNROLL for (int n = 0; n < N; ++n) at[n] = w + panel.block[n] * (K / WORD) * WORDS * LANES;
    std::memset(out, 0, sizeof(out));
    F above[N][H], least_above[N][H];
    for (int64_t g = 0; g < groups; ++g) {
      read_above(panel, groups, g, scale, least, above, least_above);
      I sum[PLANES][R][N][H] = {};
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N; ++n)
          UNROLL for (int h = 0; h < H; ++h) sum[PLANES - 1][r][n][h] = I{} + start[r * groups + g];
      for (int64_t word = 0; word < words; ++word, bytes += WORD * PLANES * R) {
        if constexpr (room(PLANES * R * N * H)) fetch_next<N, WORD>(*this, panel, K, (g * words + word) * WORD);
        add_word(at, bytes, sum);
        UNROLL for (int n = 0; n < N; ++n) at[n] += WORDS * LANES;
      }
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          int64_t of = (panel.block[n] * groups + g) * LANES + h * W;
          F s = scale.shared(of, above[n][h]) * Codes::UNIT, off{};
          if (least.each) off = least.shared(of, least_above[n][h]);
          if (zero) off = load_bytes(zero + of) * s;
          UNROLL for (int r = 0; r < R; ++r) {
            I total = sum[PLANES - 1][r][n][h];
            if constexpr (PLANES == 2) total += sum[0][r][n][h] << 8;
            out[r][n][h] += s * x_scale[r * groups + g] * __builtin_convertvector(total, F);
            if (least.each || zero) out[r][n][h] -= off * x_sum[r * groups + g];
          }
        }
      asm volatile("" ::"r"(out) : "memory");  // the whole sums wait in memory: registers are for a group's
    }
  }

  // The products of a word, eight inputs after eight. By recursion, as in `add_word`.
  template <int i = 0, int R, int N>
  static __attribute__((always_inline)) void add_word(const Word* const (&at)[N], const int8_t* bytes,
                                                      I (&sum)[PLANES][R][N][H]) {
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int h = 0; h < H; ++h) {
        U first = Codes::four(at[n], h, 2 * i), second = Codes::four(at[n], h, 2 * i + 1);
        UNROLL for (int r = 0; r < R; ++r)
          UNROLL for (int plane = 0; plane < PLANES; ++plane)
            sum[plane][r][n][h] = dot_eights<Codes::LARGEST>(sum[plane][r][n][h], first, second,
                                                             bytes + (r * PLANES + plane) * WORD + 8 * i);
      }
    if constexpr (8 * (i + 1) < WORD) add_word<i + 1>(at, bytes, sum);
  }
};

template <typename Format>
constexpr bool takes_integers = false;
template <typename Codes, typename Scale, int PLANES>
constexpr bool takes_integers<GroupedIntegers<Codes, Scale, PLANES>> = true;

// The kernels' formats. Rows become 16-bit integers where the machine has VNNI and no bfloat16 dot products that are in use.
#if defined(__AVX512VNNI__) && !defined(QUIRE_BF16_PAIRS) && !defined(QUIRE_FLOAT_ROWS)
template <typename Codes, typename AsBytes, typename Scale>
using Coded = GroupedIntegers<AsBytes, Scale, 2>;
#else
template <typename Codes, typename AsBytes, typename Scale>
using Coded = Grouped<Codes, Scale>;
#endif

using Int4 = Coded<Nibbles<Counts>, CountBytes, Float16>;
using Mxfp4 = Coded<Nibbles<Floats>, FloatBytes, Exponent>;
using Float4 = Coded<Nibbles<Floats>, FloatBytes, Wide>;
using Iq4 = Coded<Nibbles<Tabled<STEPS>>, StepBytes, Wide>;
using Uint4 = Coded<Nibbles<Counts>, CountBytes, Wide>;
using Uint5Half = Coded<Fives, FiveBytes, Float16>;
using Int8Groups = Coded<Bytes<Signed>, SignedBytes, Wide>;
using Four = Coded<Nibbles<Counts>, CountBytes, Levels>;
using Six = Coded<Sixes, SixBytes, Levels>;
using Steps = Coded<Nibbles<Tabled<STEPS>>, StepBytes, Levels>;
using Nf4 = Grouped<Nibbles<Tabled<NORMALS>>, Wide>;
using Fp4 = Grouped<Nibbles<Tabled<TWELFTHS>>, Wide>;
using Fp8 = Grouped<Bytes<Floats8>, Wide>;

// Under rows of int8.
using Int4Bytes = GroupedIntegers<CountBytes, Float16, 1>;
using Mxfp4Bytes = GroupedIntegers<FloatBytes, Exponent, 1>;
using Float4Bytes = GroupedIntegers<FloatBytes, Wide, 1>;
using Iq4Bytes = GroupedIntegers<StepBytes, Wide, 1>;
using Uint4Bytes = GroupedIntegers<CountBytes, Wide, 1>;
using Uint5HalfBytes = GroupedIntegers<FiveBytes, Float16, 1>;
using Int8GroupsBytes = GroupedIntegers<SignedBytes, Wide, 1>;
using FourBytes = GroupedIntegers<CountBytes, Levels, 1>;
using SixesBytes = GroupedIntegers<SixBytes, Levels, 1>;
using StepsBytes = GroupedIntegers<StepBytes, Levels, 1>;

}  // namespace quire
