// What the doors to the weight products share: the rows as they come, and where results go.
#pragma once

#include <vector>

#include "door.h"
#include "linear.h"

namespace quire {

inline int64_t rows_in(Buffer x) { return x.size() / x.last(); }

// Rows up to the last that is not all zeros: the padding of a step is, and its products are known.
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

// The rows in the type that a product wants, their ends filled up with zeros.
template <typename X>
struct Padded {
  std::vector<X> own;
  const X* rows;

  Padded(Pool& pool, Buffer x, int64_t T, int64_t K) {
    int64_t from = x.last();
    bool same = x.wide() == (sizeof(X) == 4);
    rows = x.data<X>();
    if (same && from == K) return;
    own.resize(T * K);
    rows = own.data();
    each_row(pool, T, K, [&](int64_t row) {
      X* out = own.data() + row * K;
      for (int64_t k = 0; k < from; ++k)
        if (same)
          out[k] = x.data<X>()[row * from + k];
        else if constexpr (sizeof(X) == 2)
          out[k] = narrow(x.data<float>()[row * from + k]);
        else
          out[k] = widen(x.data<uint16_t>()[row * from + k]);
    });
  }
};

// One product of a call: the one there is, or that of rows, a matrix of a stack and a result of their own.
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

// Runs each product of a call. Its arrays are rows, weights, a bias and, last, the names of matrices of the stack; both
// of these are empty where there is none.
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

// Products of rows of the type X, which are taken as they are: `format` says what a product's weights are.
template <typename X, typename Format>
const char* products(const Call& call, const Format& format) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    int64_t T = rows_used(p.rows()), K = p.inputs();
    Out out = p.out();
    product(pool, format(p), Padded<X>(pool, p.rows(), T, K).rows, T, K, out);
    out.fill(T, rows_in(p.rows()));
  });
}

}  // namespace quire
