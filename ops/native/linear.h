// Weight products. A weight lies in blocks of sixteen outputs; inside one, the inputs follow each other in small groups
// that one vector lane multiplies and adds at once:
//
//   [output / 16][input / group][16 outputs][group]
//
//   float32    group 1
//   bfloat16   group 2    sixteen of its vectors are a tile of AMX
//   int8       group 4    the same
//   four bits  group 8    a lane's low half holds k0 k2 k4 k6 and its high half k1 k3 k5 k7: int4, MXFP4
//
// Rows that are taken together lie interleaved, a group of each after the other: [input / group][rows][group].
//
// Every format sums over the inputs in one order, whatever the number of rows, so a row's result does not depend on
// which others ride with it. K is a multiple of 32, of int8 one of 64: what is missing lies there as zeros, in weights and rows.
#pragma once

#include "amx.h"
#include "common.h"

#include <vector>

namespace quire {

// Rows and blocks whose sums stay in registers: 24 of AVX-512's 32, or 12 of AVX2's 16. A few rows more go with half the
// blocks: where no more than those meet a weight, it then comes from memory behind their arithmetic.
#if defined(__AVX512F__)
constexpr int ROWS = 6, BLOCKS = 4, MANY = 12;
#else
constexpr int ROWS = 3, BLOCKS = 2, MANY = 3;
#endif

// Blocks of a weight that rows meet together, and how many blocks further on lies what each may fetch; 0 is nothing.
struct Panel {
  int64_t block[BLOCKS], then[BLOCKS];
};

// Into the second-level cache, beside the arithmetic. What is on its way already costs nothing.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Loops over what lies in registers: one that is not unrolled keeps it in memory.
#define UNROLL _Pragma("GCC unroll 16")

// acc + the products of sixteen pairs of bfloat16 with one pair.
inline f32x16 dot_pairs(f32x16 acc, u32x16 w, const uint16_t* x) {
#if defined(__AVX512BF16__)
  // Written out, so that the pair is spread as it is read: the compiler would keep the pairs of all rows in registers.
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const uint16_t(*)[2]>(x)));
  return acc;
#else
  acc += (f32x16)(w << 16) * widen(x[0]);
  return acc + (f32x16)(w & 0xffff0000u) * widen(x[1]);
#endif
}

// acc + the products of sixteen fours of signed bytes with one four; `x` carries 128 more than it means where the
// machine multiplies unsigned by signed bytes.
#if defined(__AVX512VNNI__) && !defined(QUIRE_AMX)
constexpr int BIAS = 128;
#else
constexpr int BIAS = 0;
#endif

inline i32x16 dot_fours(i32x16 acc, u32x16 w, const uint8_t* x) {
#if defined(__AVX512VNNI__) && !defined(QUIRE_AMX)
  int32_t four;
  std::memcpy(&four, x, 4);
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(four), (__m512i)w);
#elif defined(__AVX2__)
  const int8_t* s = reinterpret_cast<const int8_t*>(x);
  __m256i even = _mm256_set1_epi32((s[0] & 0xffff) | (s[2] << 16));
  __m256i odd = _mm256_set1_epi32((s[1] & 0xffff) | (s[3] << 16));
  union {
    i32x16 whole;
    __m256i half[2];
  } sum, bytes;
  sum.whole = acc;
  bytes.whole = (i32x16)w;
  for (int i = 0; i < 2; ++i) {
    __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(bytes.half[i], 8), 8), high = _mm256_srai_epi16(bytes.half[i], 8);
    sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(low, even));
    sum.half[i] = _mm256_add_epi32(sum.half[i], _mm256_madd_epi16(high, odd));
  }
  return sum.whole;
#else
  const int8_t* s = reinterpret_cast<const int8_t*>(x);
  for (int i = 0; i < 4; ++i) acc += ((i32x16)(w << (24 - 8 * i)) >> 24) * s[i];
  return acc;
#endif
}

struct F32 {
  using X = float;
  static constexpr int64_t BITS = 32;  // a weight
  static constexpr bool TILES = false;  // whether AMX takes it
  static constexpr int64_t GROUP = 1;  // inputs of a row that lie together
  static constexpr int MOST = ROWS;  // rows at once
  const float* w;

  template <int R, int N>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, f32x16 (&out)[R][N]) const {
    f32x16 acc[R][N] = {};
    const float* p[N];
    UNROLL for (int n = 0; n < N; ++n) p[n] = w + panel.block[n] * K * LANES;
    x += row * K;
    for (int64_t k = 0; k < K; ++k)
      UNROLL for (int n = 0; n < N; ++n) {
        f32x16 v = load(p[n] + k * LANES);
        UNROLL for (int r = 0; r < R; ++r) acc[r][n] += v * x[k * R + r];
      }
    std::memcpy(out, acc, sizeof(acc));
  }
};

struct Bf16 {
  using X = uint16_t;
  static constexpr int64_t BITS = 16;
  static constexpr bool TILES = true;
  static constexpr int64_t GROUP = 2;
  static constexpr int MOST = MANY;
  const uint16_t* w;

  f32x16 finish(f32x16 sum, int64_t, int64_t) const { return sum; }

  template <int R, int N>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, f32x16 (&out)[R][N]) const {
    f32x16 acc[R][N] = {};
    const uint16_t* p[N];
    int64_t then[N];
    UNROLL for (int n = 0; n < N; ++n) p[n] = w + panel.block[n] * K * LANES, then[n] = panel.then[n] * K * LANES;
    x += row * K;
    for (int64_t k = 0; k < K; k += 2)
      UNROLL for (int n = 0; n < N; ++n) {
        fetch(p[n] + k * LANES + then[n]);
        u32x16 v = load_bits(p[n] + k * LANES);
        UNROLL for (int r = 0; r < R; ++r) acc[r][n] = dot_pairs(acc[r][n], v, x + k * R + 2 * r);
      }
    std::memcpy(out, acc, sizeof(acc));
  }
};

// Signed bytes, a scale an output. The rows come as bytes too, with a scale each.
struct Int8 {
  using X = uint8_t;
  static constexpr int64_t BITS = 8;
  static constexpr bool TILES = true;
  static constexpr int64_t GROUP = 4;
  static constexpr int MOST = MANY;
  const int8_t* w;
  const float* scale;    // [O]
  const int32_t* sum;    // [O]: over the inputs, to take BIAS back out
  const float* x_scale;  // [T]

  // From the sums' bits to what they mean.
  f32x16 finish(f32x16 bits, int64_t block, int64_t row) const {
    i32x16 excess = (i32x16)load_bits(sum + block * LANES) * BIAS;
    return __builtin_convertvector((i32x16)bits - excess, f32x16) * (load(scale + block * LANES) * x_scale[row]);
  }

  template <int R, int N>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, f32x16 (&out)[R][N]) const {
    i32x16 acc[R][N] = {};
    const int8_t* p[N];
    int64_t then[N];
    UNROLL for (int n = 0; n < N; ++n) p[n] = w + panel.block[n] * K * LANES, then[n] = panel.then[n] * K * LANES;
    for (int64_t k = 0; k < K; k += 4)
      UNROLL for (int n = 0; n < N; ++n) {
        fetch(p[n] + k * LANES + then[n]);
        u32x16 v = load_bits(p[n] + k * LANES);
        UNROLL for (int r = 0; r < R; ++r) acc[r][n] = dot_fours(acc[r][n], v, x + row * K + k * R + 4 * r);
      }
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int r = 0; r < R; ++r) out[r][n] = finish((f32x16)acc[r][n], panel.block[n], row + r);
  }
};

// Eight bytes a pair of lanes: sixteen outputs of two signed bytes as pairs of bfloat16, which hold them exactly.
inline u32x16 widen_bytes(const int8_t* p) {
  i8x16 bytes[2];
  std::memcpy(bytes, p, 32);
#if defined(__AVX512BF16__)
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes[0]));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes[1]));
  return (u32x16)_mm512_cvtne2ps_pbh(high, low);
#else
  uint16_t pairs[32];
  for (int i = 0; i < 2; ++i) {
    f32x16 wide = __builtin_convertvector(bytes[i], f32x16);
    u16x16 half = __builtin_convertvector((u32x16)wide >> 16, u16x16);
    std::memcpy(pairs + i * LANES, &half, 32);
  }
  return load_bits(pairs);
#endif
}

// The same weights under rows of bfloat16; laid out in groups of two.
struct Int8Wide {
  using X = uint16_t;
  static constexpr int64_t BITS = 8;
  static constexpr bool TILES = false;
  static constexpr int64_t GROUP = 2;
  static constexpr int MOST = ROWS;
  const int8_t* w;
  const float* scale;

  template <int R, int N>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, f32x16 (&out)[R][N]) const {
    f32x16 acc[R][N] = {};
    const int8_t* p[N];
    UNROLL for (int n = 0; n < N; ++n) p[n] = w + panel.block[n] * K * LANES;
    x += row * K;
    for (int64_t k = 0; k < K; k += 2)
      UNROLL for (int n = 0; n < N; ++n) {
        u32x16 v = widen_bytes(p[n] + k * LANES);
        UNROLL for (int r = 0; r < R; ++r) acc[r][n] = dot_pairs(acc[r][n], v, x + k * R + 2 * r);
      }
    UNROLL for (int n = 0; n < N; ++n)
      UNROLL for (int r = 0; r < R; ++r) out[r][n] = acc[r][n] * load(scale + panel.block[n] * LANES);
  }
};

// Sixteen float16 as floats.
inline f32x16 load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  u16x16 bits;
  std::memcpy(&bits, p, 32);
  u32x16 wide = __builtin_convertvector(bits, u32x16);
  // Exponent and mantissa moved into place, then 2^112 for the difference in bias: right for subnormals too.
  f32x16 magnitude = (f32x16)((wide & 0x7fffu) << 13) * 5.192296858534828e33f;
  return (f32x16)((u32x16)magnitude | ((wide & 0x8000u) << 16));
#endif
}

// Pair j of the eight weights in each lane, by a table of bfloat16.
#if defined(__AVX512BW__)
inline u32x16 look_up(u32x16 v, int j, const uint16_t (&table)[16]) {
  __m256i once = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
  __m512i twice = _mm512_broadcast_i64x4(once);  // the lookup sees five bits, and the fifth is the next weight's
  return (u32x16)_mm512_permutexvar_epi16((__m512i)(v >> (4 * j)), twice);
}
#else
inline u32x16 look_up(u32x16 v, int j, const uint16_t (&table)[16]) {
  for (int i = 0; i < LANES; ++i) {
    uint32_t codes = v[i] >> (4 * j);
    v[i] = table[codes & 15] | static_cast<uint32_t>(table[codes >> 16 & 15]) << 16;
  }
  return v;
}
#endif

// Four bits that count, from 0 to 15: as u - 8 where a table makes them, else 128 + u, which is u with an exponent set.
struct Counts {
  using Scale = uint16_t;  // float16
  static f32x16 scale(const Scale* p) { return load_half(p); }
#if defined(__AVX512BW__)
  static constexpr float MADE = -8;
  static u32x16 unpack(u32x16 v, int j) {
    static constexpr uint16_t TABLE[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                           0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return look_up(v, j, TABLE);
  }
#else
  static constexpr float MADE = 128;
  static u32x16 unpack(u32x16 v, int j) { return ((v >> (4 * j)) & 0x000f000fu) | 0x43004300u; }
#endif
};

// Floats of four bits, E2M1; their scale is a power of two, 127 + its exponent.
struct Floats {
  using Scale = uint8_t;
  static constexpr float MADE = 0;
  static f32x16 scale(const Scale* p) {
    u8x16 exponents;
    std::memcpy(&exponents, p, LANES);
    return (f32x16)(__builtin_convertvector(exponents, u32x16) << 23);
  }
  static u32x16 unpack(u32x16 v, int j) {
    static constexpr uint16_t TABLE[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                           0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    return look_up(v, j, TABLE);
  }
};

// Four bits a weight; every `group` inputs of an output share a scale and, of counts, perhaps a zero (else it is 8).
template <typename Code>
struct Nibbles {
  using X = uint16_t;
  static constexpr int64_t BITS = 4;
  static constexpr bool TILES = false;
  static constexpr int64_t GROUP = 2;
  static constexpr int MOST = MANY;
  const uint32_t* w;
  const typename Code::Scale* scale;  // [O / 16, K / group, 16]
  const uint8_t* zero;                // the same shape, or null
  const float* x_sum;                 // [T, K / group]; null where `unpack` takes off just what is to be taken off
  int64_t group;

  template <int R, int N>
  void run(const X* x, int64_t row, int64_t K, const Panel& panel, f32x16 (&out)[R][N]) const {
    int64_t groups = K / group;
    const uint32_t* p[N];
    UNROLL for (int n = 0; n < N; ++n) {
      p[n] = w + panel.block[n] * (K / 8) * LANES;
      UNROLL for (int r = 0; r < R; ++r) out[r][n] = f32x16{};
    }
    x += row * K;
    for (int64_t g = 0; g < groups; ++g) {
      f32x16 part[R][N] = {};
      for (int64_t k = g * group; k < (g + 1) * group; k += 8)
        UNROLL for (int n = 0; n < N; ++n) {
          u32x16 v = load_bits(p[n] + k / 8 * LANES);
          UNROLL for (int j = 0; j < 4; ++j) {
            u32x16 pair = Code::unpack(v, j);
            UNROLL for (int r = 0; r < R; ++r) part[r][n] = dot_pairs(part[r][n], pair, x + (k + 2 * j) * R + 2 * r);
          }
        }
      UNROLL for (int n = 0; n < N; ++n) {
        int64_t at = (panel.block[n] * groups + g) * LANES;
        f32x16 s = Code::scale(scale + at), z = splat(Code::MADE + 8);
        if (zero)
          for (int i = 0; i < LANES; ++i) z[i] = Code::MADE + zero[at + i];
        UNROLL for (int r = 0; r < R; ++r) {
          if (x_sum) part[r][n] -= z * x_sum[(row + r) * groups + g];
          out[r][n] += s * part[r][n];
        }
      }
      asm volatile("" ::"r"(out) : "memory");  // the whole sums wait in memory: registers are for a group's
    }
  }
};

using Int4 = Nibbles<Counts>;
using Mxfp4 = Nibbles<Floats>;

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2 };

inline f32x16 activate(f32x16 x, int activation) {
  if (activation == SILU) return x / (1.0f + exp(-x));
  return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// Where results go: [T, O] in either type, with a bias or none; with an activation, gate and up in, one of them out.
struct Out {
  void* y;
  bool wide;  // float32
  const float* bias;
  int64_t O;       // outputs that are written
  int64_t blocks;  // of sixteen; under an activation those of the gate, and as many of the up part follow them
  int activation;

  void write(int64_t row, int64_t block, f32x16 value) const {
    int64_t at = row * O + block * LANES, lanes = std::min<int64_t>(LANES, O - block * LANES);
    float* wide_y = static_cast<float*>(y) + at;
    uint16_t* narrow_y = static_cast<uint16_t*>(y) + at;
    if (lanes == LANES) return wide ? store(wide_y, value) : store_narrow(narrow_y, value);
    for (int64_t i = 0; i < lanes; ++i)
      if (wide)
        wide_y[i] = value[i];
      else
        narrow_y[i] = narrow(value[i]);
  }

  // What rows of zeros come to.
  void fill(int64_t row, int64_t stop) const {
    for (; row < stop; ++row)
      for (int64_t block = 0; block < blocks; ++block) write(row, block, bias ? load(bias + block * LANES) : f32x16{});
  }
};

template <int R, int N, typename Format>
void rows_of(const Format& f, const typename Format::X* x, int64_t row, int64_t K, const Panel& panel, int used,
             const Out& out) {
  f32x16 sums[R][N];
  f.template run<R, N>(x, row, K, panel, sums);
  if (out.bias)
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r) sums[r][n] += load(out.bias + panel.block[n] * LANES);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < used; ++n)
      out.write(row + r, panel.block[n],
                out.activation ? activate(sums[r][n], out.activation) * sums[r][N / 2 + n] : sums[r][n]);
}

template <typename Format, int R = Format::MOST>
void any_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t rows, int64_t K, const Panel& panel,
              int used, const Out& out) {
  if constexpr (R <= ROWS) {
    if (rows >= R) return rows_of<R, BLOCKS>(f, x, row, K, panel, used, out);
  } else if (rows >= R) {
    // Two blocks of outputs, or one of the gate and its part of up; one call, or the compiler makes a copy for each.
    const int step = out.activation ? 1 : 2, other = out.activation ? BLOCKS / 2 : 1;
    for (int n = 0; n < used; n += step) {
      Panel pair{{panel.block[n], panel.block[n + other]}, {panel.then[n], panel.then[n + other]}};
      rows_of<R, 2>(f, x, row, K, pair, std::min(step, used - n), out);
    }
    return;
  }
  if constexpr (R > 1) any_rows<Format, R - 1>(f, x, row, rows, K, panel, used, out);
}

// How many rows a thread takes at a time: as many as its second-level cache holds beside the weights.
inline int64_t rows_a_tile(int64_t row_bytes) { return std::max<int64_t>(4, (256 << 10) / row_bytes / MANY) * MANY; }

// The weights of a product that is no longer than the reading of them.
template <typename Format>
Span weights_of(const Format& f, int64_t T, int64_t K, const Out& out) {
  if (T > 2 * MANY) return {};
  int64_t blocks = out.blocks * (out.activation ? 2 : 1);
  return {reinterpret_cast<const char*>(f.w), blocks * LANES * K * Format::BITS / 8};
}

#if defined(QUIRE_AMX)

// One step of the sums over 64 bytes of inputs, for M tiles of rows and two blocks.
template <int M, bool BYTES>
void tile_step(const uint8_t* x, int64_t stride, const uint8_t* w0, const uint8_t* w1) {
  amx::load<4>(x, stride);
  if constexpr (M == 2) amx::load<5>(x + 16 * stride, stride);
  amx::load<6>(w0, 64);
  amx::load<7>(w1, 64);
  if constexpr (BYTES) {
    amx::dot_int8<0, 4, 6>();
    amx::dot_int8<1, 4, 7>();
    if constexpr (M == 2) {
      amx::dot_int8<2, 5, 6>();
      amx::dot_int8<3, 5, 7>();
    }
  } else {
    amx::dot_bf16<0, 4, 6>();
    amx::dot_bf16<1, 4, 7>();
    if constexpr (M == 2) {
      amx::dot_bf16<2, 5, 6>();
      amx::dot_bf16<3, 5, 7>();
    }
  }
}

// The sums of up to 32 rows and two blocks, as floats; the tiles are configured for so many rows.
template <int M, typename Format>
void tile_sums(const Format& f, const typename Format::X* x, int64_t row, int64_t K, const int64_t* block,
               float (*sums)[2][LANES]) {
  constexpr bool BYTES = sizeof(*f.w) == 1;
  int64_t stride = K * sizeof(*x), row_bytes = K * LANES * sizeof(*f.w);
  auto* from = reinterpret_cast<const uint8_t*>(x + row * K);
  auto* w = reinterpret_cast<const uint8_t*>(f.w);
  amx::zero<0>();
  amx::zero<1>();
  if constexpr (M == 2) {
    amx::zero<2>();
    amx::zero<3>();
  }
  for (int64_t at = 0; at < stride; at += 64)
    tile_step<M, BYTES>(from + at, stride, w + block[0] * row_bytes + at * LANES, w + block[1] * row_bytes + at * LANES);
  amx::store<0>(sums[0][0], sizeof(*sums));
  amx::store<1>(sums[0][1], sizeof(*sums));
  if constexpr (M == 2) {
    amx::store<2>(sums[16][0], sizeof(*sums));
    amx::store<3>(sums[16][1], sizeof(*sums));
  }
}

template <typename Format>
void tile_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t rows, int64_t K, const int64_t* block,
               int used, const Out& out) {
  alignas(64) float sums[32][2][LANES];
  amx::start(amx::config(std::min<int64_t>(rows, 16), std::max<int64_t>(rows - 16, 1)));
  if (rows > 16)
    tile_sums<2>(f, x, row, K, block, sums);
  else
    tile_sums<1>(f, x, row, K, block, sums);
  for (int64_t r = 0; r < rows; ++r) {
    f32x16 value[2];
    for (int n = 0; n < 2; ++n) {
      value[n] = f.finish(load(sums[r][n]), block[n], row + r);
      if (out.bias) value[n] += load(out.bias + block[n] * LANES);
    }
    for (int n = 0; n < used; ++n)
      out.write(row + r, block[n], out.activation ? activate(value[n], out.activation) * value[1] : value[n]);
  }
}

template <typename Pool, typename Format>
void tile_product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K,
                  const Out& out) {
  const int width = out.activation ? 1 : 2;
  int64_t panels = (out.blocks + width - 1) / width;
  int64_t tile = std::max<int64_t>(1, (256 << 10) / (K * sizeof(*x)) / 32) * 32, tiles = (T + tile - 1) / tile;
  parallel(pool, panels * tiles, [&](int64_t chunk) {
    int64_t first = chunk / tiles * width, start = chunk % tiles * tile, stop = std::min(T, start + tile);
    int used = static_cast<int>(std::min<int64_t>(width, out.blocks - first));
    int64_t block[2] = {first, out.activation ? out.blocks + first : first + used - 1};
    for (int64_t row = start; row < stop; row += 32)
      tile_rows(f, x, row, std::min<int64_t>(32, stop - row), K, block, used, out);
    amx::stop();
  }, weights_of(f, T, K, out));
}

#endif

// The rows as `run` wants them: those that are taken together interleaved.
template <typename Format, typename Pool>
std::vector<typename Format::X> interleave(Pool& pool, const typename Format::X* x, int64_t T, int64_t K,
                                           int64_t most) {
  constexpr int64_t GROUP = Format::GROUP;
  std::vector<typename Format::X> mixed(T * K);
  int64_t blocks = (T + most - 1) / most, together = std::max<int64_t>(1, (64 << 10) / (most * K));
  parallel(pool, (blocks + together - 1) / together, [&](int64_t chunk) {
    for (int64_t row = chunk * together * most; row < std::min(T, (chunk + 1) * together * most); row += most) {
      int64_t rows = std::min(most, T - row);
      for (int64_t r = 0; r < rows; ++r) {
        const typename Format::X* from = x + (row + r) * K;
        typename Format::X* to = mixed.data() + row * K + r * GROUP;
        for (int64_t k = 0; k < K; k += GROUP) std::memcpy(to + k * rows, from + k, GROUP * sizeof(*x));
      }
    }
  });
  return mixed;
}

template <typename Pool, typename Format>
void product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K, const Out& out) {
#if defined(QUIRE_AMX)
  if constexpr (Format::TILES) return tile_product(pool, f, x, T, K, out);
#endif
  const int width = out.activation ? BLOCKS / 2 : BLOCKS;
  const int64_t most = T <= 2 * MANY ? Format::MOST : ROWS;
  std::vector<typename Format::X> mixed;
  if (T > 1) {
    mixed = interleave<Format>(pool, x, T, K, most);
    x = mixed.data();
  }
  int64_t panels = (out.blocks + width - 1) / width, tile = rows_a_tile(K * sizeof(*x));
  int64_t tiles = (T + tile - 1) / tile;
  parallel(pool, panels * tiles, [&](int64_t chunk, int64_t upcoming) {
    int64_t first = chunk / tiles * width, start = chunk % tiles * tile, stop = std::min(T, start + tile);
    int used = static_cast<int>(std::min<int64_t>(width, out.blocks - first));
    Panel panel{};  // one that runs over the end does its last block more than once
    for (int n = 0; n < width; ++n) panel.block[n] = first + std::min(n, used - 1);
    if (out.activation)
      for (int n = 0; n < width; ++n) panel.block[width + n] = out.blocks + panel.block[n];
    // Rows in two goes leave memory idle during the second: of four blocks to come three are fetched in the first.
    int64_t further = T > most && T <= 2 * most && upcoming < panels * tiles ? (upcoming - chunk) * width : 0;
    for (int64_t row = start; row < stop; row += most) {
      bool last = row + most >= stop;
      for (int n = 0; n < BLOCKS; ++n) panel.then[n] = last == (n == BLOCKS - 1) ? further : 0;
      any_rows(f, x, row, std::min(most, stop - row), K, panel, used, out);
    }
  }, weights_of(f, T, K, out));
}

}  // namespace quire
