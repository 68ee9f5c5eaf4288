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

inline Out out_of(const Call& call, Buffer bias, int64_t blocks) {
  Buffer y = call.result();
  int32_t activation = call.attribute<int32_t>("activation");
  return {y.data<void>(), y.wide(), bias.given<float>(), y.last(), activation ? blocks / 2 : blocks, activation};
}

}  // namespace quire
