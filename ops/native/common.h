// What the kernels share: vectors of sixteen and number formats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether pairs of bfloat16 are multiplied at once and both products added to a float: where the machine can, and unless
// rows keep all bits of float32 (-DQUIRE_FLOAT_ROWS).
#if !defined(QUIRE_FLOAT_ROWS) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define QUIRE_BF16_PAIRS 1
#endif

namespace quire {

constexpr int LANES = 16;

// The machine's vectors. Wider ones GCC would leave in memory, and take apart number by number where they are compared.
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));
typedef uint8_t U8 __attribute__((vector_size(W)));
typedef int8_t I8 __attribute__((vector_size(W)));

template <typename Vector>
Vector lanes(const void* p) {
  Vector x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// For loops over values in registers: without unrolling, the compiler keeps them in memory.
#define UNROLL _Pragma("GCC unroll 16")

// Sixteen numbers, in as many vectors as they take.
constexpr int PARTS = LANES / W;

template <typename V>
struct Sixteen {
  using Number = std::remove_reference_t<decltype(V{}[0])>;
  V part[PARTS];

  Number operator[](int i) const { return part[i / W][i % W]; }
  template <typename Other>
  Sixteen& operator+=(const Other& x) { return *this = *this + x; }
  template <typename Other>
  Sixteen& operator-=(const Other& x) { return *this = *this - x; }
  template <typename Other>
  Sixteen& operator*=(const Other& x) { return *this = *this * x; }
  template <typename Other>
  Sixteen& operator|=(const Other& x) { return *this = *this | x; }
};
typedef Sixteen<F> f32x16;
typedef Sixteen<I> i32x16;

// What `run` makes of each part.
template <typename Run, typename... V>
auto each_part(const Run& run, const Sixteen<V>&... x) {
  Sixteen<decltype(run(x.part[0]...))> y;
  UNROLL for (int i = 0; i < PARTS; ++i) y.part[i] = run(x.part[i]...);
  return y;
}

#define QUIRE_BY_PARTS(OP)                                                                                                 \
  template <typename V>                                                                                                    \
  auto operator OP(Sixteen<V> a, Sixteen<V> b) {                                                                           \
    return each_part([](V x, V y) { return x OP y; }, a, b);                                                               \
  }                                                                                                                        \
  template <typename V>                                                                                                    \
  auto operator OP(Sixteen<V> a, typename Sixteen<V>::Number b) {                                                          \
    return each_part([b](V x) { return x OP b; }, a);                                                                      \
  }                                                                                                                        \
  template <typename V>                                                                                                    \
  auto operator OP(typename Sixteen<V>::Number a, Sixteen<V> b) {                                                          \
    return each_part([a](V y) { return a OP y; }, b);                                                                      \
  }
QUIRE_BY_PARTS(+)
QUIRE_BY_PARTS(-)
QUIRE_BY_PARTS(*)
QUIRE_BY_PARTS(/)
QUIRE_BY_PARTS(|)
QUIRE_BY_PARTS(>)
QUIRE_BY_PARTS(>=)
QUIRE_BY_PARTS(!=)
#undef QUIRE_BY_PARTS
inline f32x16 operator-(f32x16 x) {
  return each_part([](F part) { return -part; }, x);
}
inline f32x16 select(i32x16 which, f32x16 x, f32x16 y) {
  return each_part([](I i, F a, F b) { return i ? a : b; }, which, x, y);
}

// The lowest byte of each lane. Written out for AVX2, where the compiler takes such a conversion apart, lane by lane.
inline U8 low_bytes(U x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i fours = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
  __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  return lanes<U8>(&bytes);
#else
  return __builtin_convertvector(x, U8);
#endif
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// acc + the products of each lane's pair of bfloat16 with one pair; each rounding is to an odd last bit where it is not exact.
inline F dot_pair(F acc, U w, const uint16_t* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return (F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)vdupq_n_u32(pair));
}
#endif

inline f32x16 load(const float* p) {
  f32x16 x;
  UNROLL for (int i = 0; i < PARTS; ++i) x.part[i] = lanes<F>(p + i * W);
  return x;
}
inline void store(float* p, f32x16 x) {
  UNROLL for (int i = 0; i < PARTS; ++i) std::memcpy(p + i * W, &x.part[i], sizeof(F));
}
inline f32x16 splat(float x) { return f32x16{} + x; }

inline float widen(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Sixteen bits into the lower half of a lane, and from there. Written out for AVX2, where the compiler does so in two halves.
inline U spread(U16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (U)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, U);
#endif
}
inline F widen(U16 bits) { return (F)(spread(bits) << 16); }
inline U16 narrow(F x) {
  U bits = (U)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U either = (I)(bits & 0x7fffffffu) > 0x7f800000 ? (bits >> 16) | 0x40u : rounded;
  return __builtin_convertvector(either, U16);
}

inline f32x16 load_wide(const uint16_t* p) {
  f32x16 x;
  UNROLL for (int i = 0; i < PARTS; ++i) x.part[i] = widen(lanes<U16>(p + i * W));
  return x;
}
inline void store_narrow(uint16_t* p, f32x16 x) {
  UNROLL for (int i = 0; i < PARTS; ++i) {
    U16 part = narrow(x.part[i]);
    std::memcpy(p + i * W, &part, sizeof(part));
  }
}

// Bytes as floats; what the compiler makes of such a conversion goes through memory, lane by lane.
inline F load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(__builtin_convertvector(lanes<I8>(p), I), F);
#endif
}
inline F load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(lanes<U8>(p), F);
#endif
}

// e to the x, within two units in the last place; 0 below -87.3, infinite above 88.7.
inline F exp(F x) {
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  F y = x < -87.3f ? F{} - 87.3f : x;
  y = y > 88.7f ? F{} + 88.7f : y;
  F shifted = y * 1.44269504f + round;
  F n = shifted - round;
  F r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  I power = ((I)shifted - 0x4b400000 + 127) << 23;
  p = p * (F)power;
  return x < -87.3f ? F{} : p;
}
inline f32x16 exp(f32x16 x) {
  return each_part([](F part) { return exp(part); }, x);
}

inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace quire
