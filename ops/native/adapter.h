// What adapters of low rank add to products: (x down) up for each row, of its own adapter.
#pragma once

#include <algorithm>
#include <vector>

#include "norm.h"

namespace quire {

// As many numbers as a vector has, or fewer at the end of a row, and zeros after them.
template <bool WIDE, typename Lanes>
F some_of(const void* at, Lanes lanes) {
  if constexpr (WIDE) {
    F x{};
    std::memcpy(&x, at, lanes * sizeof(float));
    return x;
  } else {
    U16 bits{};
    std::memcpy(&bits, at, lanes * sizeof(uint16_t));
    return widen(bits);
  }
}

// Calls run(k, vectors, lanes) for every V vectors from `begin` on, for each of those that are left, and for what is left of one;
// of whole ones both are constants.
template <int64_t V, typename Run>
void each_block(int64_t begin, int64_t end, const Run& run) {
  constexpr std::integral_constant<int64_t, W> all;
  constexpr std::integral_constant<int64_t, 1> one;
  int64_t k = begin;
  for (; k + V * W <= end; k += V * W) run(k, std::integral_constant<int64_t, V>(), all);
  for (; k + W <= end; k += W) run(k, one, all);
  if (k < end) run(k, one, end - k);
}

// Matrices, one after the other: rows of bfloat16 or float32.
struct Stack {
  const char* at;
  bool wide;
  int64_t rows, columns;  // of a matrix

  template <bool WIDE, typename Lanes>
  F some(int64_t matrix, int64_t row, int64_t column, Lanes lanes) const {
    return some_of<WIDE>(at + ((matrix * rows + row) * columns + column) * (WIDE ? 4 : 2), lanes);
  }
};

struct Adapter {
  static constexpr int64_t TOGETHER = 2;  // rows that share what is read of an adapter
  static constexpr int64_t BLOCK = 512;   // outputs of a chunk of work

  int64_t T, D, O;
  const char* x;
  bool wide;                       // whether x is float32, or bfloat16
  const int32_t* slots;            // of each row; past the last of rows without an adapter
  int64_t num_slots, each, which;  // a slot has so many matrices, of which this one is meant
  Stack down, up;                  // [D, parts * rank], [rank, O]
  const float* longer;             // [O] for each
  const int32_t* ends;             // of each part its first output, and the one after its last
  int64_t parts;
  float* out;                      // [T, O]: the products, and then the sums

  int64_t rank() const { return up.rows; }
  int64_t matrix(int64_t row) const { return slots[row] * each + which; }

  struct Some {
    int64_t count, rows[TOGETHER];
  };

  // Rows of one adapter each, some at a time.
  std::vector<Some> together() const {
    std::vector<int64_t> order;
    for (int64_t t = 0; t < T; ++t)
      if (slots[t] >= 0 && slots[t] < num_slots) order.push_back(t);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
    std::vector<Some> found;
    for (int64_t t : order) {
      if (found.empty() || found.back().count == TOGETHER || slots[found.back().rows[0]] != slots[t])
        found.push_back({});
      found.back().rows[found.back().count++] = t;
    }
    return found;
  }

  // inner [rows, parts * rank] = x down. Even inputs and odd ones have a sum each.
  template <int64_t N, bool WIDE>
  void shrink(const Some& some, float* inner) const {
    static thread_local std::vector<float> room;
    room.resize(N * D);
    const float* from = room.data();
    for (int64_t n = 0; n < N; ++n) read({x + some.rows[n] * D * (wide ? 4 : 2), wide}, D, room.data() + n * D);
    const int64_t R = down.columns, own = matrix(some.rows[0]);
    each_block<2>(0, R, [&](int64_t r, auto vectors, auto lanes) {
      constexpr int64_t V = vectors;
      F even[N][V] = {}, odd[N][V] = {};
      auto add = [&](F (&sums)[N][V], int64_t d) {
        for (int64_t v = 0; v < V; ++v) {
          F w = down.some<WIDE>(own, d, r + v * W, lanes);
          for (int64_t n = 0; n < N; ++n) sums[n][v] += w * from[n * D + d];
        }
      };
      int64_t d = 0;
      for (; d + 2 <= D; d += 2) add(even, d), add(odd, d + 1);
      if (d < D) add(even, d);
      for (int64_t n = 0; n < N; ++n)
        for (int64_t v = 0; v < V; ++v) {
          F sum = even[n][v] + odd[n][v];
          std::memcpy(inner + n * R + r + v * W, &sum, lanes * sizeof(float));
        }
    });
  }

  // out += inner up, and what DoRA adds, of the outputs from `first` to `last`.
  template <int64_t N, bool WIDE>
  void grow(const Some& some, const float* inner, int64_t first, int64_t last) const {
    const int64_t own = matrix(some.rows[0]);
    const float* more = longer + own * O;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = std::max<int64_t>(first, ends[2 * part]), end = std::min<int64_t>(last, ends[2 * part + 1]);
      each_block<4>(begin, end, [&](int64_t o, auto vectors, auto lanes) {
        constexpr int64_t V = vectors;
        F sums[N][V] = {};
        for (int64_t r = 0; r < rank(); ++r)
          for (int64_t v = 0; v < V; ++v) {
            F w = up.some<WIDE>(own, r, o + v * W, lanes);
            for (int64_t n = 0; n < N; ++n) sums[n][v] += w * inner[n * down.columns + part * rank() + r];
          }
        for (int64_t n = 0; n < N; ++n)
          for (int64_t v = 0; v < V; ++v) {
            float* to = out + some.rows[n] * O + o + v * W;
            F y = some_of<true>(to, lanes), sum = y + (sums[n][v] + some_of<true>(more + o + v * W, lanes) * y);
            std::memcpy(to, &sum, lanes * sizeof(float));
          }
      });
    }
  }

  template <bool WIDE, typename Pool>
  void run(Pool& pool) const {
    static_assert(TOGETHER == 2);
    std::vector<Some> all = together();
    if (all.empty()) return;
    const int64_t count = all.size(), room = TOGETHER * down.columns, blocks = (O + BLOCK - 1) / BLOCK;
    std::vector<float> inner(count * room);
    parallel(pool, count, [&](int64_t i) {
      float* own = &inner[i * room];
      all[i].count == 1 ? shrink<1, WIDE>(all[i], own) : shrink<2, WIDE>(all[i], own);
    });
    parallel(pool, count * blocks, [&](int64_t chunk) {
      int64_t i = chunk / blocks, first = chunk % blocks * BLOCK, last = std::min(O, first + BLOCK);
      const float* own = &inner[i * room];
      all[i].count == 1 ? grow<1, WIDE>(all[i], own, first, last) : grow<2, WIDE>(all[i], own, first, last);
    });
  }
};

}  // namespace quire
