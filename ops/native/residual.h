// Residual connection: adds a block's output, perhaps after a norm, to the residual, and normalises the sum.
#pragma once

#include <vector>

#include "norm.h"

namespace quire {

struct Residual {
  int64_t D;
  bool is_float32;    // type of all rows; else bfloat16
  const char *x, *y;  // residual and block output [T, D]; y is null if nothing is added
  Norm y_norm;        // of y, where `norms_y`
  Norm sum_norm;
  bool norms_y;
  char *sum, *norm;      // results [T, D]: x + y and its norm

  // Whether all-zero rows give all-zero results.
  bool keeps_zeros() const { return !sum_norm.bias.data && !y_norm.bias.data; }

  void process_row(int64_t row) const {
    static thread_local std::vector<float> buffer;
    buffer.resize(D);
    float* values = buffer.data();
    int64_t offset = row * D * (is_float32 ? 4 : 2);
    Row norm_input{x + offset, is_float32};
    if (y) {
      Row residual = norm_input;
      OutputRow sum_row{sum + offset, is_float32};
      read_row({y + offset, is_float32}, D, values);
      if (norms_y) y_norm.apply(values, D);
      for_each_16(D, [&](int64_t k, auto count) {
        sum_row.store_at(k, count, load_partial(residual, k, count) + load_partial(values + k, count));
      });
      norm_input = {sum_row.data, is_float32};  // the sum after rounding
    }
    read_row(norm_input, D, values);
    sum_norm.apply(values, D);
    write_row(values, D, {norm + offset, is_float32});
  }
};

}  // namespace quire
