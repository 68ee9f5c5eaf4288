// The weight products without XLA, against doubles, for the compiler's sanitizers (tests/test_native_sanitizers.py).
// Weights and rows have exact sizes, so that accesses out of bounds are seen.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "group_integers.h"
#include "linear.h"
#include "native_pool.h"

namespace {

using namespace quire;

// A pool that never starts a task: the caller must do all work.
struct BusyPool {
  std::vector<std::function<void()>> tasks;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> task) { tasks.push_back(std::move(task)); }
  ~BusyPool() {
    for (auto& task : tasks) task();
  }
};

std::mt19937 engine;
int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine); }
float normal() { return std::normal_distribution<float>()(engine); }

struct Shape {
  int64_t T = 1 + below(40), K = 128 * (1 + below(3)), blocks = 1 + below(9), O = blocks * LANES - below(LANES);
};

// Random rows, rounded to bfloat16 unless the kernels keep float32.
template <typename X = RowValue>
struct Input {
  std::vector<X> rows;
  explicit Input(const Shape& s) : rows(s.T * s.K) {
    for (X& x : rows) {
      float random_value = normal();
      if constexpr (sizeof(X) == 2)
        x = float_to_bf16(random_value);
      else
        x = ROUND_ROWS ? bf16_to_float(float_to_bf16(random_value)) : random_value;
    }
  }
  double at(int64_t i) const { return to_float(rows[i]); }
};

// Returns the product; checks that the first rows alone give the same bits.
template <typename P, typename Format>
std::vector<float> multiply(const Format& f, const typename Format::X* x, const Shape& s) {
  std::vector<float> y(s.T * s.O), alone((1 + below(s.T)) * s.O);
  for (auto* outputs : {&y, &alone}) {
    P pool;
    int64_t rows = static_cast<int64_t>(outputs->size()) / s.O;
    product(pool, f, x, rows, s.K, Output{outputs->data(), true, nullptr, s.O, s.blocks, NONE});
  }
  if (!std::equal(alone.begin(), alone.end(), y.begin())) std::puts("rows depend on the batch"), std::exit(1);
  return y;
}

template <typename Value>
double max_error(const Shape& s, const std::vector<float>& y, const Value& value) {
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
double dense_error() {
  Shape s;
  Input<Bf16::X> x(s);
  std::vector<uint16_t> w(s.blocks * LANES * s.K);
  for (uint16_t& v : w) v = float_to_bf16(normal());
  auto y = multiply<P>(Bf16{w.data()}, x.rows.data(), s);
  return max_error(s, y, [&](int64_t t, int64_t k, int64_t o) {
    return x.at(t * s.K + k) * bf16_to_float(w[(o / LANES * s.K + k / 2 * 2) * LANES + o % LANES * 2 + k % 2]);
  });
}

template <typename P>
double int8_error() {
  Shape s;
  std::vector<uint8_t> rows(s.T * s.K);
  std::vector<int8_t> w(s.blocks * LANES * s.K);
  std::vector<float> scale(s.blocks * LANES), row_scale(s.T);
  std::vector<int32_t> weight_sum(s.blocks * LANES);
  for (uint8_t& v : rows) v = static_cast<uint8_t>(below(255) - 127 + INT8_ROW_OFFSET);
  for (int8_t& v : w) v = static_cast<int8_t>(below(255) - 127);
  for (float& v : scale) v = std::abs(normal());
  for (float& v : row_scale) v = std::abs(normal());
  auto weight = [&](int64_t k, int64_t o) {
    return w[(o / LANES * s.K + k / 4 * 4) * LANES + o % LANES * 4 + k % 4];
  };
  for (int64_t o = 0; o < s.blocks * LANES; ++o)
    for (int64_t k = 0; k < s.K; ++k) weight_sum[o] += weight(k, o);
  auto y = multiply<P>(Int8{w.data(), scale.data(), weight_sum.data(), row_scale.data()}, rows.data(), s);
  return max_error(s, y, [&](int64_t t, int64_t k, int64_t o) {
    int code = static_cast<int8_t>(static_cast<uint8_t>(rows[t * s.K + k] - INT8_ROW_OFFSET));
    return double(code) * weight(k, o) * scale[o] * row_scale[t];
  });
}

enum Kind { UNSIGNED, E2M1, IQ4, SIGNED_INT8, E4M3 };

// The code of input k of an output (lane) of a block; formats.h describes the layouts.
template <int BITS>
int code_at(const std::vector<uint32_t>& w, int64_t K, int64_t block, int64_t lane, int64_t k) {
  if constexpr (BITS == 4) return w[(block * (K / 8) + k / 8) * LANES + lane] >> (k % 2 * 16 + k % 8 / 2 * 4) & 15;
  if constexpr (BITS == 5) {
    const uint32_t* words = w.data() + (block * (K / 32) + k / 32) * 5 * LANES + lane;
    int64_t pair = k % 32 / 2, half = k % 2 * 16;
    if (pair < 15) return words[pair / 3 * LANES] >> (half + pair % 3 * 5) & 31;
    int code = 0;
    for (int word = 0; word < 5; ++word) code |= (words[word * LANES] >> (half + 15) & 1) << word;
    return code;
  }
  if constexpr (BITS == 6) {
    const uint32_t* words = w.data() + (block * (K / 16) + k / 16) * 3 * LANES + lane;
    int64_t pair = k % 16 / 2, half = k % 2 * 16;
    if (pair < 6) return words[pair / 2 * LANES] >> (half + pair % 2 * 6) & 63;
    return (words[(pair - 6) * LANES] >> (half + 12) & 15) | (words[2 * LANES] >> (half + 2 * pair) & 3) << 4;
  }
  return reinterpret_cast<const int8_t*>(w.data())[(block * K + k / 2 * 2) * LANES + lane * 2 + k % 2];
}

// The value of an E4M3 float.
double e4m3_value(int bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits < 0 ? -size : size;
}

double code_value(Kind kind, int code) {
  constexpr double E2M1_VALUES[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  constexpr double IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  if (kind == E2M1) return (code & 8 ? -1 : 1) * E2M1_VALUES[code & 7];
  if (kind == IQ4) return IQ4_VALUES[code];
  return kind == E4M3 ? e4m3_value(code) : code;
}

// A random float16 from 2^-7 to 2^-5, and the value of a positive normal float16.
uint16_t random_f16() { return static_cast<uint16_t>(0x2000 + below(2048)); }
double f16_value(uint16_t bits) { return std::ldexp(1024 + bits % 1024, bits / 1024 - 25); }

template <typename Scale>
typename Scale::Stored random_scale() {
  if constexpr (std::is_same_v<Scale, E8m0Scale>) return static_cast<uint8_t>(124 + below(4));
  if constexpr (std::is_same_v<Scale, Float16Scale>) return random_f16();
  if constexpr (std::is_same_v<Scale, TwoLevelScale>) return static_cast<int8_t>(below(256) - 128);
  return normal();
}
template <typename Scale>
double scale_value(typename Scale::Stored scale) {
  if constexpr (std::is_same_v<Scale, E8m0Scale>) return std::ldexp(1, scale - 127);
  if constexpr (std::is_same_v<Scale, Float16Scale>) return f16_value(scale);
  return scale;
}

// Random rows in the type of a group-quantised format, and their values.
template <typename Format>
struct Rows {
  Input<typename Format::X> x;
  std::vector<float> sums;
  const std::vector<typename Format::X>& data = x.rows;

  Rows(const Shape& s, int64_t group_size, bool) : x(s), sums(s.T * s.K / group_size) {
    for (int64_t i = 0; i < s.T * s.K; ++i) sums[i / group_size] += to_float(x.rows[i]);
  }
  double at(int64_t i) const { return x.at(i); }
  Format format(const typename Format::Word* w, decltype(Format::scale) scale, decltype(Format::scale) minimum,
                int64_t group_size, const uint8_t* zero_point) const {
    bool needs_sums = zero_point || minimum.values || Format::DEFAULT_OFFSET != 0;
    return {w, scale, minimum, needs_sums ? sums.data() : nullptr, group_size, zero_point};
  }
};

template <typename Codes, typename Scale, int PLANES>
struct Rows<GroupQuantisedInt<Codes, Scale, PLANES>> {
  using Format = GroupQuantisedInt<Codes, Scale, PLANES>;
  typename Format::Rows quantised;
  std::vector<double> values;
  const std::vector<typename Format::X>& data = quantised.values;

  Rows(const Shape& s, int64_t group_size, bool has_offsets) : values(s.T * s.K) {
    constexpr int64_t WORD_INPUTS = Codes::WORD_INPUTS, MAX_CODE = PLANES == 2 ? 127 * 257 : 127;
    quantised.values.resize(s.T * s.K);
    auto* bytes = reinterpret_cast<int8_t*>(quantised.values.data());
    for (int64_t g = 0; g < s.T * s.K / group_size; ++g) {
      int64_t sum = 0;
      float scale = std::abs(normal());
      for (int64_t i = g * group_size; i < (g + 1) * group_size; ++i) {
        int64_t word = i / WORD_INPUTS * WORD_INPUTS;
        int64_t code = below(2 * MAX_CODE + 1) - MAX_CODE, high = (code + 128) >> 8;
        int64_t position = std::find(Codes::ORDER, Codes::ORDER + WORD_INPUTS, i - word) - Codes::ORDER;
        values[i] = double(code) * scale;
        sum += code;
        if (PLANES == 2) bytes[2 * word + position] = static_cast<int8_t>(high), code -= high * 256;
        bytes[PLANES * word + (PLANES - 1) * WORD_INPUTS + position] = static_cast<int8_t>(code);
      }
      quantised.scale.push_back(scale);
      quantised.sum.push_back(scale * sum);
      int code_offset = Format::OFFSET + (has_offsets ? 0 : Format::MIDPOINT);
      quantised.initial_sum.push_back(-code_offset * static_cast<int32_t>(sum));
    }
  }
  double at(int64_t i) const { return values[i]; }
  Format format(const typename Format::Word* w, Scale scale, Scale minimum, int64_t group_size,
                const uint8_t* zero_point) const {
    return {w, scale, minimum, quantised, group_size, zero_point};
  }
};

// Codes with a scale per group of inputs, and perhaps a minimum or a zero point.
template <typename P, typename Format, Kind KIND = UNSIGNED>
double grouped_error() {
  using Scale = decltype(Format::scale);
  constexpr bool IS_TWO_LEVEL = std::is_same_v<Scale, TwoLevelScale>;
  Shape s;
  if (IS_TWO_LEVEL) s.K *= 2;
  int64_t group_size = std::max<int64_t>(16 << below(4), Format::WORD_INPUTS), num_groups = s.K / group_size;
  int64_t num_super_blocks = s.K / TwoLevelScale::SUPER_BLOCK, outputs = s.blocks * LANES;
  std::vector<uint32_t> w(outputs * s.K * Format::BITS / 32);
  std::vector<typename Scale::Stored> scale(outputs * num_groups), minimum(scale.size());
  std::vector<uint16_t> super_scale(IS_TWO_LEVEL ? outputs * num_super_blocks : 0);
  std::vector<uint8_t> zero_point(scale.size());
  for (uint32_t& v : w) v = static_cast<uint32_t>(engine());
  auto* bytes = reinterpret_cast<int8_t*>(w.data());
  if (KIND == E4M3)
    for (size_t i = 0; i < 4 * w.size(); ++i)
      if ((bytes[i] & 0x7f) == 0x7f) bytes[i] = 0;  // NaN
  for (auto* array : {&scale, &minimum})
    for (auto& v : *array) v = random_scale<Scale>();
  for (uint16_t& v : super_scale) v = random_f16();
  for (uint8_t& v : zero_point) v = static_cast<uint8_t>(below(16));
  bool has_zero_point = std::is_same_v<Scale, Float16Scale> && Format::BITS == 4 && below(2);
  bool has_minimum = !std::is_same_v<Scale, E8m0Scale> && !has_zero_point && below(2);
  auto make_scale = [&](const auto* scales) {
    if constexpr (IS_TWO_LEVEL)
      return TwoLevelScale{scales, super_scale.data(), TwoLevelScale::SUPER_BLOCK / group_size};
    else
      return Scale(scales);
  };
  Rows<Format> rows(s, group_size, has_minimum || has_zero_point);
  Format f = rows.format(reinterpret_cast<const typename Format::Word*>(w.data()), make_scale(scale.data()),
                         make_scale(has_minimum ? minimum.data() : nullptr), group_size,
                         has_zero_point ? zero_point.data() : nullptr);
  auto y = multiply<P>(f, rows.data.data(), s);
  return max_error(s, y, [&](int64_t t, int64_t k, int64_t o) {
    int64_t block = o / LANES, lane = o % LANES, index = (block * num_groups + k / group_size) * LANES + lane;
    double code = code_value(KIND, code_at<Format::BITS>(w, s.K, block, lane, k)), super_value = 1;
    if (has_zero_point) code -= zero_point[index];
    if (KIND == UNSIGNED && !has_minimum && !has_zero_point) code -= 1 << (Format::BITS - 1);
    if (IS_TWO_LEVEL) {
      int64_t super_block = block * num_super_blocks + k / TwoLevelScale::SUPER_BLOCK;
      super_value = f16_value(super_scale[super_block * LANES + lane]);
    }
    double minimum_value = has_minimum ? scale_value<Scale>(minimum[index]) : 0;
    return rows.at(t * s.K + k) * super_value * (code * scale_value<Scale>(scale[index]) - minimum_value);
  });
}

// The largest error of one random case of each format; with float32 rows only of the decoders that differ.
double max_error_of_all_formats() {
#if defined(QUIRE_FLOAT_ROWS)
  return std::max({grouped_error<Pool, Int4>(), grouped_error<Pool, Uint6TwoLevel>(), grouped_error<Pool, Uint5Half>(),
                   grouped_error<Pool, Fp8, E4M3>()});
#else
  return std::max({dense_error<Pool>(), dense_error<BusyPool>(), int8_error<Pool>(), int8_error<BusyPool>(),
                   grouped_error<Pool, Int4>(), grouped_error<BusyPool, Int4>(), grouped_error<Pool, Mxfp4, E2M1>(),
                   grouped_error<Pool, Uint4>(), grouped_error<Pool, Int8Groups, SIGNED_INT8>(),
                   grouped_error<Pool, Uint5Half>(), grouped_error<Pool, Uint4TwoLevel>(),
                   grouped_error<BusyPool, Uint6TwoLevel>(), grouped_error<Pool, Iq4TwoLevel, IQ4>(),
                   grouped_error<Pool, Fp8, E4M3>(), grouped_error<Pool, Uint4A8>(),
                   grouped_error<Pool, Float4A8, E2M1>(), grouped_error<Pool, Iq4A8, IQ4>(),
                   grouped_error<Pool, Uint5HalfA8>(), grouped_error<BusyPool, Uint6TwoLevelA8>(),
                   grouped_error<Pool, Int8GroupsA8, SIGNED_INT8>(), grouped_error<BusyPool, Mxfp4, E2M1>(),
                   grouped_error<BusyPool, Uint4>(), grouped_error<BusyPool, Uint5Half>(),
                   // int16 rows, also where no kernel uses them
                   grouped_error<Pool, GroupQuantisedInt<Unsigned4Bytes, TwoLevelScale, 2>>(),
                   grouped_error<Pool, GroupQuantisedInt<Unsigned5Bytes, Float16Scale, 2>>(),
                   grouped_error<Pool, GroupQuantisedInt<Unsigned6Bytes, TwoLevelScale, 2>>(),
                   grouped_error<Pool, GroupQuantisedInt<SignedInt8Bytes, Float32Scale, 2>, SIGNED_INT8>()});
#endif
}

}  // namespace

int main() {
  double error = 0;
  for (int seed = 0; seed < 12; ++seed) {
    engine.seed(seed);
    error = std::max(error, max_error_of_all_formats());
  }
  std::printf("largest error %.2g\n", error);
#if defined(QUIRE_FLOAT_ROWS)
  return error < 1e-6 ? 0 : 1;
#else
  return error < 2e-5 ? 0 : 1;
#endif
}
