// Definitions that all kernels share: machine vectors, vectors of sixteen lanes, conversions between number formats,
// and exp and tanh.
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

// QUIRE_BF16_PAIRS: products use the CPU's bfloat16 dot products, which add the products of a pair of bfloat16 to a
// float. They are not used where rows keep all bits of float32 (-DQUIRE_FLOAT_ROWS).
#if !defined(QUIRE_FLOAT_ROWS) && (defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define QUIRE_BF16_PAIRS 1
#endif

namespace quire {

constexpr int LANES = 16;

// W is the number of 32-bit lanes of a machine vector. GCC would keep wider vector types in memory and compare them
// lane by lane.
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

// Loads a vector from unaligned memory.
template <typename Vector>
Vector load_as(const void* p) {
  Vector x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

// For loops over arrays that must stay in registers: without unrolling, the compiler keeps them in memory.
#define UNROLL _Pragma("GCC unroll 16")

// Sixteen lanes, in VECTORS machine vectors.
constexpr int VECTORS = LANES / W;

template <typename V>
struct Vec16 {
  using Element = std::remove_reference_t<decltype(V{}[0])>;
  V vector[VECTORS];

  Element operator[](int i) const { return vector[i / W][i % W]; }
  template <typename Operand>
  Vec16& operator+=(const Operand& x) { return *this = *this + x; }
  template <typename Operand>
  Vec16& operator-=(const Operand& x) { return *this = *this - x; }
  template <typename Operand>
  Vec16& operator*=(const Operand& x) { return *this = *this * x; }
  template <typename Operand>
  Vec16& operator|=(const Operand& x) { return *this = *this | x; }
};
typedef Vec16<F> f32x16;
typedef Vec16<I> i32x16;

// Applies `run` to the machine vectors of the arguments.
template <typename Run, typename... V>
auto map_vectors(const Run& run, const Vec16<V>&... x) {
  Vec16<decltype(run(x.vector[0]...))> y;
  UNROLL for (int i = 0; i < VECTORS; ++i) y.vector[i] = run(x.vector[i]...);
  return y;
}

#define QUIRE_LANEWISE(OP)                                                                                             \
  template <typename V>                                                                                                \
  auto operator OP(Vec16<V> a, Vec16<V> b) {                                                                           \
    return map_vectors([](V x, V y) { return x OP y; }, a, b);                                                         \
  }                                                                                                                    \
  template <typename V>                                                                                                \
  auto operator OP(Vec16<V> a, typename Vec16<V>::Element b) {                                                         \
    return map_vectors([b](V x) { return x OP b; }, a);                                                                \
  }                                                                                                                    \
  template <typename V>                                                                                                \
  auto operator OP(typename Vec16<V>::Element a, Vec16<V> b) {                                                         \
    return map_vectors([a](V y) { return a OP y; }, b);                                                                \
  }
QUIRE_LANEWISE(+)
QUIRE_LANEWISE(-)
QUIRE_LANEWISE(*)
QUIRE_LANEWISE(/)
QUIRE_LANEWISE(|)
QUIRE_LANEWISE(>)
QUIRE_LANEWISE(>=)
QUIRE_LANEWISE(!=)
#undef QUIRE_LANEWISE
inline f32x16 operator-(f32x16 x) {
  return map_vectors([](F v) { return -v; }, x);
}
inline f32x16 select(i32x16 mask, f32x16 x, f32x16 y) {
  return map_vectors([](I m, F a, F b) { return m ? a : b; }, mask, x, y);
}

// The lowest byte of each lane. AVX2 uses intrinsics, since the compiler would convert lane by lane.
inline U8 low_bytes(U x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i packed = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));
  __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  return load_as<U8>(&bytes);
#else
  return __builtin_convertvector(x, U8);
#endif
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// acc + the products of each lane's bfloat16 pair with the pair at `x`. The instruction rounds inexact results to odd.
inline F dot_bf16_pair(F acc, U w, const uint16_t* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return (F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)vdupq_n_u32(pair));
}
#endif

inline f32x16 load(const float* p) {
  f32x16 x;
  UNROLL for (int i = 0; i < VECTORS; ++i) x.vector[i] = load_as<F>(p + i * W);
  return x;
}
inline void store(float* p, f32x16 x) {
  UNROLL for (int i = 0; i < VECTORS; ++i) std::memcpy(p + i * W, &x.vector[i], sizeof(F));
}
inline f32x16 splat(float x) { return f32x16{} + x; }

inline float bf16_to_float(uint16_t bits) {
  uint32_t float_bits = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &float_bits, 4);
  return x;
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Zero-extends 16-bit lanes to 32 bits. AVX2 uses an intrinsic, since the compiler would convert in two halves.
inline U zero_extend(U16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (U)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, U);
#endif
}
inline F bf16_to_float(U16 bits) { return (F)(zero_extend(bits) << 16); }
inline U16 float_to_bf16(F x) {
  U bits = (U)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  U result = (I)(bits & 0x7fffffffu) > 0x7f800000 ? (bits >> 16) | 0x40u : rounded;
  return __builtin_convertvector(result, U16);
}

inline f32x16 load_bf16(const uint16_t* p) {
  f32x16 x;
  UNROLL for (int i = 0; i < VECTORS; ++i) x.vector[i] = bf16_to_float(load_as<U16>(p + i * W));
  return x;
}
inline void store_bf16(uint16_t* p, f32x16 x) {
  UNROLL for (int i = 0; i < VECTORS; ++i) {
    U16 bits = float_to_bf16(x.vector[i]);
    std::memcpy(p + i * W, &bits, sizeof(bits));
  }
}

// Loads W bytes and converts them to float. AVX uses intrinsics, since the compiler would convert lane by lane in
// memory.
inline F load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(__builtin_convertvector(load_as<I8>(p), I), F);
#endif
}
inline F load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(load_as<U8>(p), F);
#endif
}

// e^x, within two units in the last place; 0 below -87.3, infinity above 88.7.
inline F exp(F x) {
  const float round_bias = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  F y = x < -87.3f ? F{} - 87.3f : x;
  y = y > 88.7f ? F{} + 88.7f : y;
  F shifted = y * 1.44269504f + round_bias;
  F n = shifted - round_bias;
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
  return map_vectors([](F v) { return exp(v); }, x);
}

inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace quire
