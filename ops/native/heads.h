// A layer's heads: queries and keys normalised and rotated, values as they are or normalised.
#pragma once

#include <vector>

#include "norm.h"

namespace quire {

enum HeadNorms { NONE = 0, EACH = 1, ALL = 2, TURNED = 3 };  // over each, over all together, over each once it is rotated

// The first `pairs` numbers of a head turned with as many after them.
inline void rotate(float* x, int64_t pairs, const float* cos, const float* sin) {
  sixteens(pairs, [&](int64_t k, auto lanes) {
    f32x16 c = get(cos + k, lanes), s = get(sin + k, lanes), a = get(x + k, lanes), b = get(x + pairs + k, lanes);
    put(x + k, lanes, a * c - b * s), put(x + pairs + k, lanes, b * c + a * s);
  });
}

struct Heads {
  int64_t queries, keys, of_row, H;  // heads; those of a row, and the width of one
  bool wide;                         // whether they are float32, or bfloat16
  const char* qkv;
  int64_t pairs;  // of each head, that are rotated
  const float *cos, *sin;
  HeadNorms norm;
  Norm q_norm, k_norm, v_norm;
  bool tied, norms_values;  // tied: the values are the keys before their norm
  char *q, *k, *v;

  void row(int64_t number) const {
    part(number, 0, queries, q, norm, q_norm, pairs);
    if (!keys) return;
    part(number, queries, keys, k, norm, k_norm, pairs);
    part(number, tied ? queries : queries + keys, keys, v, norms_values ? EACH : NONE, v_norm, 0);
  }

  // `count` heads from `first` on.
  void part(int64_t row, int64_t first, int64_t count, char* to, HeadNorms kind, const Norm& own, int64_t rotated) const {
    static thread_local std::vector<float> room;
    const int64_t size = wide ? 4 : 2;
    room.resize(count * H);
    read({qkv + (row * of_row + first) * H * size, wide}, count * H, room.data());
    if (kind == ALL) own.apply(room.data(), count * H);
    for (float* head = room.data(); head < room.data() + count * H; head += H) {
      if (kind == EACH) own.apply(head, H);
      if (rotated) rotate(head, rotated, cos + row * rotated, sin + row * rotated);
      if (kind == TURNED) own.apply(head, H);
    }
    write(room.data(), count * H, {to + row * count * H * size, wide});
  }
};

}  // namespace quire
