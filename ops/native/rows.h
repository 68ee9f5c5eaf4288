// What the entries to the weight products share: reading the rows, and placing the results.
#pragma once

#include <cmath>
#include <vector>

#include "ffi.h"
#include "group_bytes.h"
#include "linear.h"

namespace quire {

inline int64_t rows_in(Buffer x) { return x.size() / x.last(); }

// Rows up to the last that is not all zeros: a step's padding is zeros, whose products are known.
inline int64_t rows_used(Buffer x) {
  int64_t T = rows_in(x), size = x.last() * (x.wide() ? 2 : 1);
  auto empty = [&](int64_t row) {
    const uint16_t* at = x.data<uint16_t>() + row * size;
    uint16_t any = 0;
    for (int64_t i = 0; i < size; ++i) any |= at[i];
    return !any;
  };
  while (T > 0 && empty(T - 1)) --T;
  return T;
}

// Work on every row, spread over the threads where there is enough of it.
template <typename Run>
void each_row(Pool& pool, int64_t T, int64_t K, const Run& run) {
  int64_t rows = std::max<int64_t>(1, (32 << 10) / K);
  parallel(pool, (T + rows - 1) / rows, [&](int64_t chunk) {
    for (int64_t row = chunk * rows; row < std::min(T, (chunk + 1) * rows); ++row) run(row);
  });
}

// A row in float32, from either type.
struct Row {
  const void* at;
  bool wide;

  Row(Buffer x, int64_t row) : wide(x.wide()) {
    at = x.data<const char>() + row * x.last() * (wide ? 4 : 2);
  }
  f32x16 sixteen(int64_t k) const {
    return wide ? load(static_cast<const float*>(at) + k) : load_wide(static_cast<const uint16_t*>(at) + k);
  }
  float one(int64_t k) const {
    return wide ? static_cast<const float*>(at)[k] : widen(static_cast<const uint16_t*>(at)[k]);
  }

  // The numbers from `from` to `to` as bytes, and what to multiply those with: the largest becomes 127. Where one is not
  // finite, neither is that.
  float bytes(int64_t from, int64_t to, uint8_t* out, uint32_t bias) const {
    constexpr float ROUND = 12582912.0f;  // see `exp`
    constexpr uint32_t ZERO = 0x4b400000u;
    int64_t whole = from + (to - from) / LANES * LANES;
    f32x16 most{}, poison{};
    for (int64_t k = from; k < whole; k += LANES) {
      f32x16 v = sixteen(k), size = (f32x16)((u32x16)v & 0x7fffffffu);
      most = size > most ? size : most;
      poison += v * 0.0f;
    }
    float largest = 0, spoilt = 0;
    for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]), spoilt += poison[i];
    for (int64_t k = whole; k < to; ++k) largest = std::max(largest, std::fabs(one(k))), spoilt += one(k) * 0;
    float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;  // which is a number
    for (int64_t k = from; k < whole; k += LANES) {
      u8x16 bytes = __builtin_convertvector((u32x16)(sixteen(k) * inverse + ROUND) - ZERO + bias, u8x16);
      std::memcpy(out + k - from, &bytes, LANES);
    }
    for (int64_t k = whole; k < to; ++k) {
      float shifted = one(k) * inverse + ROUND;
      uint32_t bits;
      std::memcpy(&bits, &shifted, 4);
      out[k - from] = static_cast<uint8_t>(bits - ZERO + bias);
    }
    return largest / 127.0f + spoilt;
  }
};

// The rows in a format's type, their ends filled up with zeros.
template <typename Format>
struct Padded {
  using X = typename Format::X;
  std::vector<X> own;
  const X* rows;

  Padded(Pool& pool, Buffer x, int64_t T, int64_t K) {
    int64_t from = x.last();
    rows = x.data<X>();
    if (from == K && x.wide() == (sizeof(X) == 4) && !(x.wide() && Format::NARROW)) return;
    own.resize(T * K);
    rows = own.data();
    each_row(pool, T, K, [&](int64_t row) {
      X* out = own.data() + row * K;
      if (x.wide())
        copy(x.data<float>() + row * from, from, out);
      else
        copy(x.data<uint16_t>() + row * from, from, out);
    });
  }

  template <typename From>
  static void copy(const From* in, int64_t count, X* out) {
    for (int64_t k = 0; k < count; ++k)
      if constexpr (std::is_same_v<From, X> && !(sizeof(X) == 4 && Format::NARROW))
        out[k] = in[k];
      else if constexpr (sizeof(X) == 2)
        out[k] = narrow(in[k]);
      else if constexpr (sizeof(From) == 2)
        out[k] = widen(in[k]);
      else
        out[k] = widen(narrow(in[k]));
  }
};

// The sum of each row over each group of inputs.
inline std::vector<float> group_sums(Pool& pool, const Half* rows, int64_t T, int64_t K, int64_t group) {
  int64_t groups = K / group;
  std::vector<float> sums(T * groups);
  each_row(pool, T, K, [&](int64_t row) {
    for (int64_t g = 0; g < groups; ++g) {
      float sum[LANES] = {};
      const Half* at = rows + row * K + g * group;
      for (int64_t k = 0; k < group; ++k) sum[k % LANES] += value(at[k]);
      for (float part : sum) sums[row * groups + g] += part;
    }
  });
  return sums;
}

// Rows as bytes in groups; every code stands for so much `more` than its own number.
inline GroupBytes group_bytes(Pool& pool, Buffer x, int64_t T, int64_t K, int64_t group, int more) {
  constexpr int PLACE[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of an input in its word, whose four low halves come first
  int64_t from = x.last(), groups = K / group;
  auto shared = static_cast<size_t>(T * groups);
  std::vector<float> zeros(shared);
  GroupBytes found{std::vector<int8_t>(T * K), zeros, zeros, std::vector<int32_t>(shared)};
  each_row(pool, T, K, [&](int64_t row) {
    std::vector<uint8_t> bytes(group);
    for (int64_t g = 0; g < groups && g * group < from; ++g) {
      int64_t at = row * groups + g, stop = std::min(from, (g + 1) * group);
      std::fill(bytes.begin(), bytes.end(), 0);
      float scale = Row(x, row).bytes(g * group, stop, bytes.data(), 0);
      int8_t* out = found.rows.data() + row * K + g * group;
      int32_t sum = 0;
      for (int64_t k = 0; k < group; ++k) sum += out[k / 8 * 8 + PLACE[k % 8]] = static_cast<int8_t>(bytes[k]);
      found.scale[at] = scale, found.sum[at] = scale * sum, found.start[at] = -more * sum;
    }
  });
  return found;
}

// One product of a call: the only one, or one of several, with rows, a matrix of the stack and a result of its own.
struct Product {
  const Call& call;
  int64_t turn = -1, matrix = -1;  // -1: there is no stack

  Buffer rows() const { return turn < 0 ? call.array(0) : call.array(0).part(turn); }
  Buffer weight(int64_t i = 1) const { return matrix < 0 ? call.array(i) : call.array(i).part(matrix); }
  int64_t inputs() const {
    Buffer w = weight();
    return w.dim(1) * (w.type() == dtype::U32 ? 8 : w.dim(3));  // a word holds eight
  }
  Out out() const {
    Buffer y = turn < 0 ? call.result() : call.result().part(turn);
    int32_t activation = call.attribute<int32_t>("activation");
    const float* bias = call.array(call.arrays() - 2).given<float>();
    int64_t blocks = weight().dim(0);
    return {y.data<void>(), y.wide(), bias, y.last(), activation ? blocks / 2 : blocks, activation};
  }
};

// Runs each product of a call. Its arrays are rows, weights, a bias (or an empty array) and, last, the numbers of the
// matrices of the stack (empty if there is no stack).
template <typename Run>
const char* each_product(const Call& call, const Run& run) {
  Buffer names = call.array(call.arrays() - 1);
  const int32_t* matrix = names.given<int32_t>();
  if (!matrix) run(Product{call});
  for (int64_t i = 0; i < names.size(); ++i) {
    if (matrix[i] < 0 || matrix[i] >= call.array(1).dim(0)) return "the stack has no such matrix";
    run(Product{call, i, matrix[i]});
  }
  return nullptr;
}

// Products of a format that takes rows as they are: `weights` gives a product's weights.
template <typename Format, typename Weights>
const char* products(const Call& call, const Weights& weights) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    int64_t T = rows_used(p.rows()), K = p.inputs();
    Out out = p.out();
    product(pool, weights(p), Padded<Format>(pool, p.rows(), T, K).rows, T, K, out);
    out.fill(T, rows_in(p.rows()));
  });
}

// What the groups of a product's weight share.
template <typename Scale>
struct Shared {
  Scale scale, least;
  const uint8_t* zero = nullptr;
};

// Products of a format whose weights are codes in groups; `shared` gives what those of a product share.
template <typename Format, typename Of>
const char* grouped_products(const Call& call, const Of& shared) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    Buffer x = p.rows();
    int64_t T = rows_used(x), K = p.weight().dim(1) * Format::WORD, group = K / p.weight(2).dim(1);
    Out out = p.out();
    auto own = shared(p, group);
    bool taken_off = own.zero || own.least.each;
    auto* w = p.weight().data<typename Format::Word>();
    if constexpr (std::is_same_v<typename Format::X, int8_t>) {
      GroupBytes bytes = group_bytes(pool, x, T, K, group, Format::OFFSET + (taken_off ? 0 : Format::MIDDLE));
      product(pool, Format{w, own.scale, own.least, bytes, group, own.zero}, bytes.rows.data(), T, K, out);
    } else {
      Padded<Format> padded(pool, x, T, K);
      bool summed = taken_off || Format::REST != 0;
      std::vector<float> sums = group_sums(pool, padded.rows, summed ? T : 0, K, group);
      Format f{w, own.scale, own.least, summed ? sums.data() : nullptr, group, own.zero};
      product(pool, f, padded.rows, T, K, out);
    }
    out.fill(T, rows_in(x));
  });
}

}  // namespace quire
