// The sum of a row and of what a block gave, or of its norm, and the norm of the sum.
#pragma once

#include <vector>

#include "norm.h"

namespace quire {

struct Residual {
  int64_t D;
  bool wide;  // whether rows are float32, or bfloat16
  const char *x, *y;  // y: null where nothing is added
  Norm added, own;
  bool normed;  // whether what is added is the norm of y
  char *sum, *norm;

  // Rows of zeros at the end give zeros, unless a bias ends that.
  bool keeps_zeros() const { return !own.bias.at && !added.bias.at; }

  void row(int64_t number) const {
    static thread_local std::vector<float> room;
    room.resize(D);
    float* at = room.data();
    int64_t offset = number * D * (wide ? 4 : 2);
    Row kept{x + offset, wide};
    if (y) {
      Row from = kept;
      Place to{sum + offset, wide};
      read({y + offset, wide}, D, at);
      if (normed) added.apply(at, D);
      sixteens(D, [&](int64_t k, auto lanes) { to.put(k, lanes, get(from, k, lanes) + get(at + k, lanes)); });
      kept = {to.at, wide};  // it is the norm of the sum as it is kept
    }
    read(kept, D, at);
    own.apply(at, D);
    write(at, D, {norm + offset, wide});
  }
};

}  // namespace quire
