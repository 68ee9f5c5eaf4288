// Attention heads of a layer: splits the projection into queries, keys and values, normalises them and applies RoPE.
#pragma once

#include <vector>

#include "norm.h"

namespace quire {

// Norms of queries and keys: none, of each head, of all heads together, of each head after RoPE.
enum HeadNorms { NONE = 0, PER_HEAD = 1, ALL_HEADS = 2, PER_HEAD_AFTER_ROPE = 3 };

// Applies RoPE: rotates each of the first `pairs` values of a head with the value `pairs` after it.
inline void rotate(float* x, int64_t pairs, const float* cos, const float* sin) {
  for_each_16(pairs, [&](int64_t k, auto count) {
    f32x16 c = load_partial(cos + k, count), s = load_partial(sin + k, count);
    f32x16 a = load_partial(x + k, count), b = load_partial(x + pairs + k, count);
    store_partial(x + k, count, a * c - b * s);
    store_partial(x + pairs + k, count, b * c + a * s);
  });
}

struct Heads {
  int64_t q_heads, kv_heads;
  int64_t qkv_heads;  // heads of a row of `qkv`
  int64_t H;
  bool is_float32;         // type of qkv, q, k and v; else bfloat16
  const char* qkv;         // [T, qkv_heads, H]
  int64_t pairs;           // rotated pairs of each head
  const float *cos, *sin;  // [T, pairs]
  HeadNorms norm;
  Norm q_norm, k_norm, v_norm;
  bool tied;          // whether the values are the keys before norm and RoPE
  bool norms_values;
  char *q, *k, *v;

  void process_row(int64_t row) const {
    process_heads(row, 0, q_heads, q, norm, q_norm, pairs);
    if (!kv_heads) return;
    process_heads(row, q_heads, kv_heads, k, norm, k_norm, pairs);
    process_heads(row, tied ? q_heads : q_heads + kv_heads, kv_heads, v, norms_values ? PER_HEAD : NONE, v_norm, 0);
  }

  // Processes `count` heads from `first` on.
  void process_heads(int64_t row, int64_t first, int64_t count, char* out, HeadNorms kind, const Norm& head_norm,
                     int64_t num_pairs) const {
    static thread_local std::vector<float> buffer;
    const int64_t value_bytes = is_float32 ? 4 : 2;
    buffer.resize(count * H);
    read_row({qkv + (row * qkv_heads + first) * H * value_bytes, is_float32}, count * H, buffer.data());
    if (kind == ALL_HEADS) head_norm.apply(buffer.data(), count * H);
    for (float* head = buffer.data(); head < buffer.data() + count * H; head += H) {
      if (kind == PER_HEAD) head_norm.apply(head, H);
      if (num_pairs) rotate(head, num_pairs, cos + row * num_pairs, sin + row * num_pairs);
      if (kind == PER_HEAD_AFTER_ROPE) head_norm.apply(head, H);
    }
    write_row(buffer.data(), count * H, {out + row * count * H * value_bytes, is_float32});
  }
};

}  // namespace quire
