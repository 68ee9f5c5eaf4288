// LoRA and DoRA adapters: adds (x down) up to the products of rows, each row with its own adapter.
#pragma once

#include <algorithm>
#include <vector>

#include "norm.h"

namespace quire {

// Loads `count` values of float32 or bfloat16, at most one machine vector; the other lanes are zeros.
template <bool IS_FLOAT32, typename Count>
F load_vector(const void* address, Count count) {
  if constexpr (IS_FLOAT32) {
    F x{};
    std::memcpy(&x, address, count * sizeof(float));
    return x;
  } else {
    U16 bits{};
    std::memcpy(&bits, address, count * sizeof(uint16_t));
    return bf16_to_float(bits);
  }
}

// Calls run(k, vectors, count) for every V vectors from `begin` to `end`, then for each remaining vector and for the
// tail. `count` is the number of values in a vector. Both are compile-time constants, except the count of the tail.
template <int64_t V, typename Run>
void for_each_block(int64_t begin, int64_t end, const Run& run) {
  constexpr std::integral_constant<int64_t, W> full;
  constexpr std::integral_constant<int64_t, 1> one_vector;
  int64_t k = begin;
  for (; k + V * W <= end; k += V * W) run(k, std::integral_constant<int64_t, V>(), full);
  for (; k + W <= end; k += W) run(k, one_vector, full);
  if (k < end) run(k, one_vector, end - k);
}

// A stack of matrices [matrix, rows, columns].
struct Stack {
  const char* data;
  bool is_float32;  // else bfloat16
  int64_t rows, columns;

  template <bool IS_FLOAT32, typename Count>
  F load(int64_t matrix, int64_t row, int64_t column, Count count) const {
    return load_vector<IS_FLOAT32>(data + ((matrix * rows + row) * columns + column) * (IS_FLOAT32 ? 4 : 2), count);
  }
};

struct Adapter {
  static constexpr int64_t MAX_ROWS = 2;         // rows that share the loads of an adapter
  static constexpr int64_t CHUNK_OUTPUTS = 512;  // outputs of a chunk of work

  int64_t T, D, O;
  const char* x;         // [T, D]
  bool is_float32;       // whether x is float32; else bfloat16
  const int32_t* slots;  // [T], the adapter of each row; num_slots for rows without one
  int64_t num_slots;
  int64_t slot_matrices;   // matrices of a slot in the stacks
  int64_t slot_matrix;     // index of the matrix to apply among those of a slot
  Stack down, up;          // [D, num_parts * rank], [rank, O]
  const float* dora_gain;  // [matrix, O], times the product, added to it (DoRA)
  const int32_t* bounds;   // [num_parts, 2], first output of each part and the one after its last
  int64_t num_parts;       // parts of the outputs have separate `down` matrices, such as those of q, k and v
  float* out;              // [T, O], the products; the results replace them

  int64_t rank() const { return up.rows; }
  int64_t matrix(int64_t row) const { return slots[row] * slot_matrices + slot_matrix; }

  // Rows of one adapter that are computed together.
  struct RowGroup {
    int64_t count, rows[MAX_ROWS];
  };

  std::vector<RowGroup> row_groups() const {
    std::vector<int64_t> order;
    for (int64_t t = 0; t < T; ++t)
      if (slots[t] >= 0 && slots[t] < num_slots) order.push_back(t);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
    std::vector<RowGroup> groups;
    for (int64_t t : order) {
      if (groups.empty() || groups.back().count == MAX_ROWS || slots[groups.back().rows[0]] != slots[t])
        groups.push_back({});
      groups.back().rows[groups.back().count++] = t;
    }
    return groups;
  }

  // inner [rows, num_parts * rank] = x down. Even and odd inputs have separate accumulators.
  template <int64_t N, bool IS_FLOAT32>
  void shrink(const RowGroup& group, float* inner) const {
    static thread_local std::vector<float> buffer;
    buffer.resize(N * D);
    const float* rows = buffer.data();
    for (int64_t n = 0; n < N; ++n)
      read_row({x + group.rows[n] * D * (is_float32 ? 4 : 2), is_float32}, D, buffer.data() + n * D);
    const int64_t R = down.columns, group_matrix = matrix(group.rows[0]);
    for_each_block<2>(0, R, [&](int64_t r, auto vectors, auto count) {
      constexpr int64_t V = vectors;
      F even[N][V] = {}, odd[N][V] = {};
      auto add = [&](F (&sums)[N][V], int64_t d) {
        for (int64_t v = 0; v < V; ++v) {
          F w = down.load<IS_FLOAT32>(group_matrix, d, r + v * W, count);
          for (int64_t n = 0; n < N; ++n) sums[n][v] += w * rows[n * D + d];
        }
      };
      int64_t d = 0;
      for (; d + 2 <= D; d += 2) add(even, d), add(odd, d + 1);
      if (d < D) add(even, d);
      for (int64_t n = 0; n < N; ++n)
        for (int64_t v = 0; v < V; ++v) {
          F sum = even[n][v] + odd[n][v];
          std::memcpy(inner + n * R + r + v * W, &sum, count * sizeof(float));
        }
    });
  }

  // out += inner up + dora_gain * out, for the outputs from `first` to `last`.
  template <int64_t N, bool IS_FLOAT32>
  void expand(const RowGroup& group, const float* inner, int64_t first, int64_t last) const {
    const int64_t group_matrix = matrix(group.rows[0]);
    const float* gain = dora_gain + group_matrix * O;
    for (int64_t part = 0; part < num_parts; ++part) {
      int64_t begin = std::max<int64_t>(first, bounds[2 * part]);
      int64_t end = std::min<int64_t>(last, bounds[2 * part + 1]);
      for_each_block<4>(begin, end, [&](int64_t o, auto vectors, auto count) {
        constexpr int64_t V = vectors;
        F sums[N][V] = {};
        for (int64_t r = 0; r < rank(); ++r)
          for (int64_t v = 0; v < V; ++v) {
            F w = up.load<IS_FLOAT32>(group_matrix, r, o + v * W, count);
            for (int64_t n = 0; n < N; ++n) sums[n][v] += w * inner[n * down.columns + part * rank() + r];
          }
        for (int64_t n = 0; n < N; ++n)
          for (int64_t v = 0; v < V; ++v) {
            float* target = out + group.rows[n] * O + o + v * W;
            F y = load_vector<true>(target, count);
            F sum = y + (sums[n][v] + load_vector<true>(gain + o + v * W, count) * y);
            std::memcpy(target, &sum, count * sizeof(float));
          }
      });
    }
  }

  // IS_FLOAT32 is the type of `down` and `up`.
  template <bool IS_FLOAT32, typename Pool>
  void run(Pool& pool) const {
    static_assert(MAX_ROWS == 2);
    std::vector<RowGroup> groups = row_groups();
    if (groups.empty()) return;
    const int64_t num_groups = groups.size();
    const int64_t inner_size = MAX_ROWS * down.columns;
    const int64_t num_chunks = (O + CHUNK_OUTPUTS - 1) / CHUNK_OUTPUTS;
    std::vector<float> inner(num_groups * inner_size);
    parallel(pool, num_groups, [&](int64_t i) {
      float* group_inner = &inner[i * inner_size];
      groups[i].count == 1 ? shrink<1, IS_FLOAT32>(groups[i], group_inner)
                           : shrink<2, IS_FLOAT32>(groups[i], group_inner);
    });
    parallel(pool, num_groups * num_chunks, [&](int64_t chunk) {
      int64_t i = chunk / num_chunks;
      int64_t first = chunk % num_chunks * CHUNK_OUTPUTS;
      int64_t last = std::min(O, first + CHUNK_OUTPUTS);
      const float* group_inner = &inner[i * inner_size];
      groups[i].count == 1 ? expand<1, IS_FLOAT32>(groups[i], group_inner, first, last)
                           : expand<2, IS_FLOAT32>(groups[i], group_inner, first, last);
    });
  }
};

}  // namespace quire
