// Codes of four bits under rows of bytes. As codes share a scale in groups of inputs, so do a row's bytes: the products of
// a group are added as whole numbers, and both scales are applied once.
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

// What codes stand for, as bytes: OFFSET more than parts of UNIT. Those that count stand for MIDDLE less where nothing is
// said to be taken off.
struct CountBytes {
  static constexpr int LARGEST = 15, OFFSET = 0, MIDDLE = 8;
  static constexpr float UNIT = 1;
  static U bytes(U codes) { return codes; }
};
struct FloatBytes {
  static constexpr int LARGEST = 24, OFFSET = 12, MIDDLE = 0;
  static constexpr float UNIT = 0.5f;
  static U bytes(U codes) {
    static constexpr uint8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return look_up_bytes(codes, TABLE);
  }
};
struct StepBytes {
  static constexpr int LARGEST = 240, OFFSET = 127, MIDDLE = 0;
  static constexpr float UNIT = 1;
  static U bytes(U codes) {
    static constexpr uint8_t TABLE[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
    return look_up_bytes(codes, TABLE);
  }
};

// Rows as signed bytes, in the order in which the codes of a word lie, and what each group of them shares.
struct GroupBytes {
  std::vector<int8_t> rows;
  std::vector<float> scale, sum;  // [T, K / group]; the sum of the numbers that the bytes stand for
  std::vector<int32_t> start;     // the same: what the sum of products starts from, to take off what all codes have more
};

template <typename Codes, typename Scale>
struct GroupedBytes {
  using X = int8_t;
  static constexpr int64_t BITS = 4, WORD = 8, GROUP = 8;
  static constexpr bool WIDENS = false, TILES = false;
  static constexpr int MOST = FEW_REGISTERS ? ROWS : MANY, FULL = ROWS;  // rows' bytes take registers too
  static constexpr int OFFSET = Codes::OFFSET, MIDDLE = Codes::MIDDLE;
  using Word = uint32_t;
  const Word* w;
  Scale scale, least;
  const GroupBytes& x_shared;
  int64_t group;
  const uint8_t* zero = nullptr;

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N, bool>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, F (&out)[R][N][H]) const {
    int64_t groups = K / group, words = group / WORD;
    const float *x_scale = x_shared.scale.data() + row * groups, *x_sum = x_shared.sum.data() + row * groups;
    const int32_t* start = x_shared.start.data() + row * groups;
    x += row * K;
    const Word* at[N];
    UNROLL for (int n = 0; n < N; ++n) at[n] = w + panel.block[n] * K / WORD * LANES;
    std::memset(out, 0, sizeof(out));
    F above[N][H], least_above[N][H];
    for (int64_t g = 0; g < groups; ++g) {
      read_above(panel, groups, g, scale, least, above, least_above);
      I sum[R][N][H];
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N; ++n)
          UNROLL for (int h = 0; h < H; ++h) sum[r][n][h] = I{} + start[r * groups + g];
      for (int64_t word = 0; word < words; ++word, x += WORD * R) {
        if constexpr (room(R * N * H)) fetch_next<N, WORD>(*this, panel, K, (g * words + word) * WORD);
        UNROLL for (int n = 0; n < N; ++n) {
          UNROLL for (int h = 0; h < H; ++h) {
            U v = lanes<U>(at[n] + h * W);
            U low = Codes::bytes(v & 0x0f0f0f0fu), high = Codes::bytes(v >> 4 & 0x0f0f0f0fu);
            UNROLL for (int r = 0; r < R; ++r)
              sum[r][n][h] = dot_eights<Codes::LARGEST>(sum[r][n][h], low, high, x + WORD * r);
          }
          at[n] += LANES;
        }
      }
      UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int h = 0; h < H; ++h) {
          int64_t of = (panel.block[n] * groups + g) * LANES + h * W;
          F s = scale.shared(of, above[n][h]) * Codes::UNIT, off{};
          if (least.each) off = least.shared(of, least_above[n][h]);
          if (zero) off = load_bytes(zero + of) * s;
          UNROLL for (int r = 0; r < R; ++r) {
            out[r][n][h] += s * x_scale[r * groups + g] * __builtin_convertvector(sum[r][n][h], F);
            if (least.each || zero) out[r][n][h] -= off * x_sum[r * groups + g];
          }
        }
      asm volatile("" ::"r"(out) : "memory");  // the whole sums wait in memory: registers are for a group's
    }
  }
};

using Int4Bytes = GroupedBytes<CountBytes, Float16>;
using Mxfp4Bytes = GroupedBytes<FloatBytes, Exponent>;
using Float4Bytes = GroupedBytes<FloatBytes, Wide>;
using Iq4Bytes = GroupedBytes<StepBytes, Wide>;
using Uint4Bytes = GroupedBytes<CountBytes, Wide>;
using FourBytes = GroupedBytes<CountBytes, Levels>;
using StepsBytes = GroupedBytes<StepBytes, Levels>;

}  // namespace quire
