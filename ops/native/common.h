// What the kernels share: vectors of sixteen and number formats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Whether the machine multiplies pairs of bfloat16 and adds both products to a float.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUIRE_BF16_PAIRS 1
#endif

namespace quire {

constexpr int LANES = 16;

// GCC and Clang turn these into whatever vectors the machine has: one of AVX-512, two of AVX2, four of NEON.
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x16u __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16u __attribute__((vector_size(64), aligned(4)));

typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

// And as many as a vector of the machine holds, for loops that keep sums in registers: wider ones GCC leaves in memory.
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

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// acc + the products of each lane's pair of bfloat16 with one pair; each rounding is to an odd last bit where it is not exact.
inline F dot_pair(F acc, U w, const uint16_t* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return (F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)vdupq_n_u32(pair));
}
#endif

inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16u*>(p); }
inline void store(float* p, f32x16 x) { *reinterpret_cast<f32x16u*>(p) = x; }
inline u32x16 load_bits(const void* p) { return *reinterpret_cast<const u32x16u*>(p); }
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

// Sixteen bfloat16 from a 32-byte vector, and back.
inline f32x16 load_wide(const uint16_t* p) {
  u16x16 bits;
  std::memcpy(&bits, p, 32);
  return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

inline void store_narrow(uint16_t* p, f32x16 x) {
  for (int at = 0; at < LANES; at += W) {  // GCC takes vectors wider than the machine's apart, number by number
    U bits = lanes<U>(reinterpret_cast<const char*>(&x) + at * 4);
    U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    U either = (I)(bits & 0x7fffffffu) > 0x7f800000 ? (bits >> 16) | 0x40u : rounded;
    U16 half = __builtin_convertvector(either, U16);
    std::memcpy(p + at, &half, sizeof(half));
  }
}

// e to the x, within two units in the last place; 0 below -87.3, infinite above 88.7.
inline f32x16 exp(f32x16 x) {
  f32x16 found;
  for (int at = 0; at < LANES; at += W) {  // in the machine's own vectors, see `store_narrow`
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    F v = lanes<F>(reinterpret_cast<const char*>(&x) + at * 4);
    F y = v < -87.3f ? F{} - 87.3f : v;
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
    p = v < -87.3f ? F{} : p;
    std::memcpy(reinterpret_cast<char*>(&found) + at * 4, &p, sizeof(p));
  }
  return found;
}

inline f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace quire
