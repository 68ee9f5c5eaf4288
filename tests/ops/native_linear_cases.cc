// The weight products without XLA, against doubles, for the compiler's sanitizers (tests/test_native_sanitizers.py).
// Weights and rows have exact sizes, so that accesses out of bounds are seen.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "group_bytes.h"
#include "linear.h"
#include "native_pool.h"

namespace {

using namespace quire;

// A pool whose threads never begin: the caller must be able to do all work.
struct Parked {
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> task) { tasks.push_back(std::move(task)); }
  ~Parked() {
    for (auto& task : tasks) task();
  }
};

std::mt19937 engine;
int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine); }
float normal() { return std::normal_distribution<float>()(engine); }

struct Shape {
  int64_t T = 1 + below(40), K = 128 * (1 + below(3)), blocks = 1 + below(9), O = blocks * LANES - below(LANES);
};

// Rows in bfloat16, or in float32 with all bits, and their values.
template <typename X = Half>
struct Input {
  std::vector<X> rows;
  explicit Input(const Shape& s) : rows(s.T * s.K) {
    for (X& x : rows) {
      float number = normal();
      if constexpr (sizeof(X) == 2)
        x = narrow(number);
      else
        x = NARROW_ROWS ? widen(narrow(number)) : number;
    }
  }
  double at(int64_t i) const { return value(rows[i]); }
};

// Returns the product; checks that the first rows alone give the same bits.
template <typename P, typename Format>
std::vector<float> multiply(const Format& f, const typename Format::X* x, const Shape& s) {
  std::vector<float> y(s.T * s.O), alone((1 + below(s.T)) * s.O);
  for (auto* outputs : {&y, &alone}) {
    P pool;
    int64_t rows = static_cast<int64_t>(outputs->size()) / s.O;
    product(pool, f, x, rows, s.K, Out{outputs->data(), true, nullptr, s.O, s.blocks, NONE});
  }
  if (!std::equal(alone.begin(), alone.end(), y.begin())) std::puts("rows depend on the batch"), std::exit(1);
  return y;
}

template <typename Value>
double worst(const Shape& s, const std::vector<float>& y, const Value& value) {
  double error = 0;
  for (int64_t t = 0; t < s.T; ++t)
    for (int64_t o = 0; o < s.O; ++o) {
      double sum = 0, size = 1;
      for (int64_t k = 0; k < s.K; ++k) {
        double term = value(t, k, o);
        sum += term, size += std::abs(term);
      }
      error = std::max(error, std::abs(sum - y[t * s.O + o]) / size);
    }
  return error;
}

template <typename P>
double dense() {
  Shape s;
  Input<Bf16::X> x(s);
  std::vector<uint16_t> w(s.blocks * LANES * s.K);
  for (uint16_t& v : w) v = narrow(normal());
  auto y = multiply<P>(Bf16{w.data()}, x.rows.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    return x.at(t * s.K + k) * widen(w[(o / LANES * s.K + k / 2 * 2) * LANES + o % LANES * 2 + k % 2]);
  });
}

template <typename P>
double bytes() {
  Shape s;
  std::vector<uint8_t> rows(s.T * s.K);
  std::vector<int8_t> w(s.blocks * LANES * s.K);
  std::vector<float> scale(s.blocks * LANES), x_scale(s.T);
  std::vector<int32_t> sum(s.blocks * LANES);
  for (uint8_t& v : rows) v = static_cast<uint8_t>(below(255) - 127 + BIAS);
  for (int8_t& v : w) v = static_cast<int8_t>(below(255) - 127);
  for (float& v : scale) v = std::abs(normal());
  for (float& v : x_scale) v = std::abs(normal());
  auto weight = [&](int64_t k, int64_t o) {
    return w[(o / LANES * s.K + k / 4 * 4) * LANES + o % LANES * 4 + k % 4];
  };
  for (int64_t o = 0; o < s.blocks * LANES; ++o)
    for (int64_t k = 0; k < s.K; ++k) sum[o] += weight(k, o);
  auto y = multiply<P>(Int8{w.data(), scale.data(), sum.data(), x_scale.data()}, rows.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    int code = static_cast<int8_t>(static_cast<uint8_t>(rows[t * s.K + k] - BIAS));
    return double(code) * weight(k, o) * scale[o] * x_scale[t];
  });
}

template <typename P>
double nibbles() {
  Shape s;
  Input<> x(s);
  int64_t group = 32 << below(3), groups = s.K / group;
  std::vector<uint32_t> w(s.blocks * LANES * s.K / 8);
  std::vector<uint16_t> scale(s.blocks * LANES * groups, 0x3400);  // 0.25 in float16
  std::vector<uint8_t> zero(s.blocks * LANES * groups);
  std::vector<float> sums(s.T * groups);
  for (uint32_t& v : w) v = static_cast<uint32_t>(engine());
  for (uint8_t& v : zero) v = static_cast<uint8_t>(below(16));
  for (int64_t i = 0; i < s.T * s.K; ++i) sums[i / group] += value(x.rows[i]);
  bool zeros = below(2);
  const float* x_sum = zeros || Int4::REST != 0 ? sums.data() : nullptr;
  Int4 f{w.data(), Float16(scale.data()), Float16(nullptr), x_sum, group, zeros ? zero.data() : nullptr};
  auto y = multiply<P>(f, x.rows.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    uint32_t lane = w[(o / LANES * (s.K / 8) + k / 8) * LANES + o % LANES];
    int code = lane >> (k % 2 * 16 + k % 8 / 2 * 4) & 15;
    int middle = zeros ? zero[(o / LANES * groups + k / group) * LANES + o % LANES] : 8;
    return x.at(t * s.K + k) * (code - middle) * 0.25;
  });
}

template <typename P>
double floats() {
  constexpr double VALUES[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  Shape s;
  Input<> x(s);
  int64_t groups = s.K / 32;
  std::vector<uint32_t> w(s.blocks * LANES * s.K / 8);
  std::vector<uint8_t> scale(s.blocks * LANES * groups);
  for (uint32_t& v : w) v = static_cast<uint32_t>(engine());
  for (uint8_t& v : scale) v = static_cast<uint8_t>(124 + below(4));
  Mxfp4 f{w.data(), Exponent(scale.data()), Exponent(nullptr), nullptr, 32};
  auto y = multiply<P>(f, x.rows.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    uint32_t lane = w[(o / LANES * (s.K / 8) + k / 8) * LANES + o % LANES];
    int code = lane >> (k % 2 * 16 + k % 8 / 2 * 4) & 15;
    double value = std::ldexp(VALUES[code & 7], scale[(o / LANES * groups + k / 32) * LANES + o % LANES] - 127);
    return x.at(t * s.K + k) * (code & 8 ? -value : value);
  });
}

// 4-bit codes times int8 rows.
template <typename P, typename Format>
double byte_rows() {
  constexpr int PLACE[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  constexpr double VALUES[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  constexpr double STEPS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  Shape s;
  int64_t group = 32 << below(3), groups = s.K / group, outputs = s.blocks * LANES;
  std::vector<uint32_t> w(outputs * s.K / 8);
  std::vector<float> scale(outputs * groups), minimum(outputs * groups);
  bool has_minimum = below(2);
  GroupBytes x{std::vector<int8_t>(s.T * s.K), {}, {}, {}};
  for (uint32_t& v : w) v = static_cast<uint32_t>(engine());
  for (auto* array : {&scale, &minimum})
    for (float& v : *array) v = normal();
  for (int8_t& v : x.rows) v = static_cast<int8_t>(below(255) - 127);
  for (int64_t i = 0; i < s.T * groups; ++i) {
    int32_t sum = 0;
    for (int64_t k = 0; k < group; ++k) sum += x.rows[i * group + k];
    x.scale.push_back(std::abs(normal()));
    x.sum.push_back(x.scale[i] * sum);
    x.start.push_back(-(Format::OFFSET + (has_minimum ? 0 : Format::MIDDLE)) * sum);
  }
  Format f{w.data(), Wide(scale.data()), Wide(has_minimum ? minimum.data() : nullptr), x, group};
  auto y = multiply<P>(f, x.rows.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    int64_t block = o / LANES, lane = o % LANES, at = (block * groups + k / group) * LANES + lane;
    int code = w[(block * (s.K / 8) + k / 8) * LANES + lane] >> (k % 2 * 16 + k % 8 / 2 * 4) & 15;
    double number = code - (has_minimum ? 0 : 8);
    if (std::is_same_v<Format, Float4Bytes>) number = (code & 8 ? -1 : 1) * VALUES[code & 7];
    if (std::is_same_v<Format, Iq4Bytes>) number = STEPS[code];
    double row = x.rows[t * s.K + k / 8 * 8 + PLACE[k % 8]] * x.scale[t * groups + k / group];
    return row * (number * scale[at] - (has_minimum ? minimum[at] : 0));
  });
}

// An E4M3 float.
double small_float(int8_t bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits < 0 ? -size : size;
}

// A float16 from 2^-7 to 2^-5, and what a positive one that is not subnormal means.
uint16_t small_half() { return static_cast<uint16_t>(0x2000 + below(2048)); }
double from_half(uint16_t bits) { return std::ldexp(1024 + bits % 1024, bits / 1024 - 25); }

// Codes of 4, 5, 6 or 8 bits with a scale per group, and perhaps a minimum.
template <typename P, typename Format, typename Scale>
double grouped() {
  constexpr bool LEVELS = std::is_same_v<Scale, Levels>, HALF = std::is_same_v<Scale, Float16>;
  Shape s;
  if (LEVELS) s.K *= 2;
  Input<> x(s);
  int64_t group = std::max<int64_t>(16 << below(4), Format::WORD), groups = s.K / group;
  int64_t supers = s.K / Levels::SUPER, outputs = s.blocks * LANES;
  std::vector<uint32_t> w(outputs * s.K * Format::BITS / 32);
  std::vector<typename Scale::Each> scale(outputs * groups), minimum(scale.size());
  std::vector<uint16_t> super_scale(LEVELS ? outputs * supers : 0);
  std::vector<float> sums(s.T * groups);
  for (uint32_t& v : w) v = static_cast<uint32_t>(engine());
  auto* bytes = reinterpret_cast<int8_t*>(w.data());
  if (std::is_same_v<Format, Fp8>)
    for (size_t i = 0; i < 4 * w.size(); ++i)
      if ((bytes[i] & 0x7f) == 0x7f) bytes[i] = 0;  // NaN
  for (auto* array : {&scale, &minimum})
    for (auto& v : *array) v = HALF ? small_half() : LEVELS ? below(256) - 128 : normal();
  for (uint16_t& v : super_scale) v = small_half();
  for (int64_t i = 0; i < s.T * s.K; ++i) sums[i / group] += value(x.rows[i]);
  bool has_minimum = below(2);
  auto make_scale = [&](const auto* scales) {
    if constexpr (LEVELS)
      return Levels{scales, super_scale.data(), Levels::SUPER / group};
    else
      return Scale(scales);
  };
  auto number = [](auto shared) { return HALF ? from_half(static_cast<uint16_t>(shared)) : double(shared); };
  const float* x_sum = has_minimum || Format::REST != 0 ? sums.data() : nullptr;
  Format f{reinterpret_cast<const typename Format::Word*>(w.data()), make_scale(scale.data()),
           make_scale(has_minimum ? minimum.data() : nullptr), x_sum, group};
  auto y = multiply<P>(f, x.rows.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    int64_t block = o / LANES, lane = o % LANES, at = (block * groups + k / group) * LANES + lane;
    double code, super_value = 1;
    if (Format::BITS == 8) {
      int8_t byte = bytes[(block * s.K + k / 2 * 2) * LANES + lane * 2 + k % 2];
      code = std::is_same_v<Format, Fp8> ? small_float(byte) : byte;
    } else if (Format::BITS == 4) {
      code = w[(block * (s.K / 8) + k / 8) * LANES + lane] >> (k % 2 * 16 + k % 8 / 2 * 4) & 15;
      if (!has_minimum) code -= 8;
    } else if (Format::BITS == 5) {
      const uint32_t* words = w.data() + (block * (s.K / 32) + k / 32) * 5 * LANES + lane;
      int64_t pair = k % 32 / 2, half = k % 2 * 16;
      uint32_t all = words[pair / 3 * LANES * (pair < 15)] >> (half + pair % 3 * 5) & 31;
      if (pair == 15) {
        all = 0;
        for (int word = 0; word < 5; ++word) all |= (words[word * LANES] >> (half + 15) & 1) << word;
      }
      code = double(all) - (has_minimum ? 0 : 16);
    } else {
      const uint32_t* words = w.data() + (block * (s.K / 16) + k / 16) * 3 * LANES + lane;
      int64_t pair = k % 16 / 2, half = k % 2 * 16;
      uint32_t all = pair < 6 ? words[pair / 2 * LANES] >> (half + pair % 2 * 6) & 63
                              : (words[(pair - 6) * LANES] >> (half + 12) & 15) |
                                    (words[2 * LANES] >> (half + 2 * pair) & 3) << 4;
      code = double(all) - (has_minimum ? 0 : 32);
    }
    if (LEVELS) super_value = from_half(super_scale[(block * supers + k / Levels::SUPER) * LANES + lane]);
    double minimum_value = has_minimum ? number(minimum[at]) : 0;
    return x.at(t * s.K + k) * super_value * (code * number(scale[at]) - minimum_value);
  });
}

// The largest error of one case of each kind; for float32 rows only of those that decode weights differently.
double max_error_of_all_kinds() {
#if defined(QUIRE_FLOAT_ROWS)
  return std::max({nibbles<Pool>(), grouped<Parked, Six, Levels>(), grouped<Pool, Uint5Half, Float16>(),
                   grouped<Pool, Fp8, Wide>()});
#else
  return std::max({dense<Pool>(), bytes<Pool>(), nibbles<Pool>(), floats<Pool>(), dense<Parked>(), bytes<Parked>(),
                   nibbles<Parked>(), floats<Parked>(), grouped<Pool, Uint4, Wide>(), grouped<Pool, Int8Groups, Wide>(),
                   grouped<Pool, Four, Levels>(), grouped<Pool, Six, Levels>(), grouped<Parked, Uint4, Wide>(),
                   grouped<Parked, Six, Levels>(), byte_rows<Pool, Uint4Bytes>(), byte_rows<Pool, Float4Bytes>(),
                   byte_rows<Pool, Iq4Bytes>(), grouped<Pool, Fp8, Wide>(), grouped<Pool, Uint5Half, Float16>(),
                   grouped<Parked, Uint5Half, Float16>()});
#endif
}

}  // namespace

int main() {
  double error = 0;
  for (int seed = 0; seed < 12; ++seed) {
    engine.seed(seed);
    error = std::max(error, max_error_of_all_kinds());
  }
  std::printf("largest error %.2g\n", error);
  return error < 2e-5 ? 0 : 1;
}
