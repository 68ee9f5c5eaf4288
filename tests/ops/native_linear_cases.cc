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

enum Kind { COUNTS, FLOATS, STEPS, SIGNED, SMALL_FLOATS };

// The code of an input of a block's output, as `formats.h` describes the layouts.
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

// An E4M3 float.
double small_float(int bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return bits < 0 ? -size : size;
}

double code_value(Kind kind, int code) {
  constexpr double VALUES[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  constexpr double STEP_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  if (kind == FLOATS) return (code & 8 ? -1 : 1) * VALUES[code & 7];
  if (kind == STEPS) return STEP_VALUES[code];
  return kind == SMALL_FLOATS ? small_float(code) : code;
}

// A float16 from 2^-7 to 2^-5, and what a positive one that is not subnormal means.
uint16_t small_half() { return static_cast<uint16_t>(0x2000 + below(2048)); }
double from_half(uint16_t bits) { return std::ldexp(1024 + bits % 1024, bits / 1024 - 25); }

template <typename Scale>
typename Scale::Each random_scale() {
  if constexpr (std::is_same_v<Scale, Exponent>) return static_cast<uint8_t>(124 + below(4));
  if constexpr (std::is_same_v<Scale, Float16>) return small_half();
  if constexpr (std::is_same_v<Scale, Levels>) return static_cast<int8_t>(below(256) - 128);
  return normal();
}
template <typename Scale>
double scale_value(typename Scale::Each scale) {
  if constexpr (std::is_same_v<Scale, Exponent>) return std::ldexp(1, scale - 127);
  if constexpr (std::is_same_v<Scale, Float16>) return from_half(scale);
  return scale;
}

// Rows as a format of codes takes them, and their values.
template <typename Format>
struct Rows {
  Input<typename Format::X> x;
  std::vector<float> sums;
  const std::vector<typename Format::X>& data = x.rows;

  Rows(const Shape& s, int64_t group, bool) : x(s), sums(s.T * s.K / group) {
    for (int64_t i = 0; i < s.T * s.K; ++i) sums[i / group] += value(x.rows[i]);
  }
  double at(int64_t i) const { return x.at(i); }
  Format format(const typename Format::Word* w, decltype(Format::scale) scale, decltype(Format::scale) least,
                int64_t group, const uint8_t* zero) const {
    bool summed = zero || least.each || Format::REST != 0;
    return {w, scale, least, summed ? sums.data() : nullptr, group, zero};
  }
};

template <typename Codes, typename Scale, int PLANES>
struct Rows<GroupedIntegers<Codes, Scale, PLANES>> {
  using Format = GroupedIntegers<Codes, Scale, PLANES>;
  typename Format::Rows integers;
  std::vector<double> values;
  const std::vector<typename Format::X>& data = integers.rows;

  Rows(const Shape& s, int64_t group, bool taken_off) : values(s.T * s.K) {
    constexpr int64_t WORD = Codes::WORD, LARGEST = PLANES == 2 ? 127 * 257 : 127;
    integers.rows.resize(s.T * s.K);
    auto* bytes = reinterpret_cast<int8_t*>(integers.rows.data());
    for (int64_t at = 0; at < s.T * s.K / group; ++at) {
      int64_t sum = 0;
      float scale = std::abs(normal());
      for (int64_t i = at * group; i < (at + 1) * group; ++i) {
        int64_t word = i / WORD * WORD, number = below(2 * LARGEST + 1) - LARGEST, high = (number + 128) >> 8;
        int64_t place = std::find(Codes::ORDER, Codes::ORDER + WORD, i - word) - Codes::ORDER;
        values[i] = double(number) * scale;
        sum += number;
        if (PLANES == 2) bytes[2 * word + place] = static_cast<int8_t>(high), number -= high * 256;
        bytes[PLANES * word + (PLANES - 1) * WORD + place] = static_cast<int8_t>(number);
      }
      integers.scale.push_back(scale);
      integers.sum.push_back(scale * sum);
      integers.start.push_back(-(Format::OFFSET + (taken_off ? 0 : Format::MIDDLE)) * static_cast<int32_t>(sum));
    }
  }
  double at(int64_t i) const { return values[i]; }
  Format format(const typename Format::Word* w, Scale scale, Scale least, int64_t group, const uint8_t* zero) const {
    return {w, scale, least, integers, group, zero};
  }
};

// Codes with a scale per group of inputs, and perhaps a minimum or a zero point.
template <typename P, typename Format, Kind KIND = COUNTS>
double grouped() {
  using Scale = decltype(Format::scale);
  constexpr bool LEVELS = std::is_same_v<Scale, Levels>;
  Shape s;
  if (LEVELS) s.K *= 2;
  int64_t group = std::max<int64_t>(16 << below(4), Format::WORD), groups = s.K / group;
  int64_t supers = s.K / Levels::SUPER, outputs = s.blocks * LANES;
  std::vector<uint32_t> w(outputs * s.K * Format::BITS / 32);
  std::vector<typename Scale::Each> scale(outputs * groups), minimum(scale.size());
  std::vector<uint16_t> super_scale(LEVELS ? outputs * supers : 0);
  std::vector<uint8_t> zero(scale.size());
  for (uint32_t& v : w) v = static_cast<uint32_t>(engine());
  auto* bytes = reinterpret_cast<int8_t*>(w.data());
  if (KIND == SMALL_FLOATS)
    for (size_t i = 0; i < 4 * w.size(); ++i)
      if ((bytes[i] & 0x7f) == 0x7f) bytes[i] = 0;  // NaN
  for (auto* array : {&scale, &minimum})
    for (auto& v : *array) v = random_scale<Scale>();
  for (uint16_t& v : super_scale) v = small_half();
  for (uint8_t& v : zero) v = static_cast<uint8_t>(below(16));
  bool has_zero = std::is_same_v<Scale, Float16> && Format::BITS == 4 && below(2);
  bool has_minimum = !std::is_same_v<Scale, Exponent> && !has_zero && below(2);
  auto make_scale = [&](const auto* scales) {
    if constexpr (LEVELS)
      return Levels{scales, super_scale.data(), Levels::SUPER / group};
    else
      return Scale(scales);
  };
  Rows<Format> rows(s, group, has_minimum || has_zero);
  Format f = rows.format(reinterpret_cast<const typename Format::Word*>(w.data()), make_scale(scale.data()),
                         make_scale(has_minimum ? minimum.data() : nullptr), group, has_zero ? zero.data() : nullptr);
  auto y = multiply<P>(f, rows.data.data(), s);
  return worst(s, y, [&](int64_t t, int64_t k, int64_t o) {
    int64_t block = o / LANES, lane = o % LANES, at = (block * groups + k / group) * LANES + lane;
    double code = code_value(KIND, code_at<Format::BITS>(w, s.K, block, lane, k)), super_value = 1;
    if (has_zero) code -= zero[at];
    if (KIND == COUNTS && !has_minimum && !has_zero) code -= 1 << (Format::BITS - 1);
    if (LEVELS) super_value = from_half(super_scale[(block * supers + k / Levels::SUPER) * LANES + lane]);
    double minimum_value = has_minimum ? scale_value<Scale>(minimum[at]) : 0;
    return rows.at(t * s.K + k) * super_value * (code * scale_value<Scale>(scale[at]) - minimum_value);
  });
}

// The largest error of one case of each kind; for float32 rows only of those that decode weights differently.
double max_error_of_all_kinds() {
#if defined(QUIRE_FLOAT_ROWS)
  return std::max({grouped<Pool, Int4>(), grouped<Pool, Six>(), grouped<Pool, Uint5Half>(),
                   grouped<Pool, Fp8, SMALL_FLOATS>()});
#else
  return std::max({dense<Pool>(), dense<Parked>(), bytes<Pool>(), bytes<Parked>(), grouped<Pool, Int4>(),
                   grouped<Parked, Int4>(), grouped<Pool, Mxfp4, FLOATS>(), grouped<Pool, Uint4>(),
                   grouped<Pool, Int8Groups, SIGNED>(), grouped<Pool, Uint5Half>(), grouped<Pool, Four>(),
                   grouped<Parked, Six>(), grouped<Pool, Steps, STEPS>(), grouped<Pool, Fp8, SMALL_FLOATS>(),
                   grouped<Pool, Uint4Bytes>(), grouped<Pool, Float4Bytes, FLOATS>(), grouped<Pool, Iq4Bytes, STEPS>(),
                   grouped<Pool, Uint5HalfBytes>(), grouped<Parked, SixesBytes>(),
                   grouped<Pool, Int8GroupsBytes, SIGNED>(), grouped<Parked, Mxfp4, FLOATS>(),
                   grouped<Parked, Uint4>(), grouped<Parked, Uint5Half>(),
                   // 16-bit rows, also where no kernel uses them
                   grouped<Pool, GroupedIntegers<CountBytes, Levels, 2>>(),
                   grouped<Pool, GroupedIntegers<FiveBytes, Float16, 2>>(),
                   grouped<Pool, GroupedIntegers<SixBytes, Levels, 2>>(),
                   grouped<Pool, GroupedIntegers<SignedBytes, Wide, 2>, SIGNED>()});
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
