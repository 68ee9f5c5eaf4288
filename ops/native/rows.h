// What the entries to the weight products share: reading the rows, and placing the results.
#pragma once

#include <vector>

#include "ffi.h"
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
    Padded<Format> padded(pool, x, T, K);
    auto own = shared(p, group);
    bool summed = own.zero || own.least.each || Format::REST != 0;
    std::vector<float> sums = group_sums(pool, padded.rows, summed ? T : 0, K, group);
    auto* w = p.weight().data<typename Format::Word>();
    Format f{w, own.scale, own.least, summed ? sums.data() : nullptr, group, own.zero};
    product(pool, f, padded.rows, T, K, out);
    out.fill(T, rows_in(x));
  });
}

}  // namespace quire
