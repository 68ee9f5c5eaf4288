// Gated delta rule. A work item is up to COLUMNS columns of the memory of one head of one sequence. Columns do not
// depend on each other: each is updated from the first row to the last in a fixed order, so results are
// batch-invariant.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>

#include "common.h"

namespace quire::delta {

constexpr int64_t COLUMNS = 2 * LANES;

// Arguments of the op, as in `quire.ops.delta_net`.
struct DeltaCall {
  int64_t T, K, H, N, V, num_slots;
  const float *q, *k, *v, *decay, *beta;
  const int32_t *starts, *slots, *is_first_step, *num_kept;
  float *memory, *out;  // memory: [num_slots, N, H, V]
  bool corrects;        // whether the memory's prediction is subtracted from the value
  bool by_key;          // whether each dimension of a key has its own decay
};

// Columns are processed as Vec16, or one by one at the end if V is no multiple of sixteen.
template <typename Vector>
Vector load_columns(const float* p) {
  return load_as<Vector>(p);
}
template <>
inline f32x16 load_columns(const float* p) {
  return load(p);
}

template <typename Vector>
void store_columns(float* p, Vector x) {
  std::memcpy(p, &x, sizeof(x));
}
inline void store_columns(float* p, f32x16 x) { store(p, x); }

// Updates COUNT vectors of columns of a head's memory with one row, and computes the row's output. `memory` points to
// the first of these columns; consecutive rows of the memory are V floats apart.
template <typename Vector, int COUNT>
void update_row(const DeltaCall& a, int64_t t, int64_t n, int64_t column, float* memory) {
  const float* k = a.k + (t * a.K + n / (a.N / a.K)) * a.H;
  const float* q = a.q + (t * a.K + n / (a.N / a.K)) * a.H;
  const float* decay = a.decay + (t * a.N + n) * (a.by_key ? a.H : 1);
  const float beta = a.beta[t * a.N + n];
  constexpr int64_t SIZE = sizeof(Vector) / 4;
  Vector prediction[COUNT] = {}, output[COUNT] = {}, error[COUNT];
  for (int64_t h = 0; h < a.H; ++h)
    for (int c = 0; c < COUNT; ++c) {
      float* address = memory + h * a.V + c * SIZE;
      Vector decayed = load_columns<Vector>(address) * decay[a.by_key ? h : 0];
      prediction[c] += decayed * k[h];
      store_columns(address, decayed);
    }
  for (int c = 0; c < COUNT; ++c) {
    error[c] = load_columns<Vector>(a.v + (t * a.N + n) * a.V + column + c * SIZE);
    error[c] = (a.corrects ? error[c] - prediction[c] : error[c]) * beta;
  }
  for (int64_t h = 0; h < a.H; ++h)
    for (int c = 0; c < COUNT; ++c) {
      float* address = memory + h * a.V + c * SIZE;
      Vector updated = load_columns<Vector>(address) + error[c] * k[h];
      output[c] += updated * q[h];
      store_columns(address, updated);
    }
  for (int c = 0; c < COUNT; ++c) store_columns(a.out + (t * a.N + n) * a.V + column + c * SIZE, output[c]);
}

inline void update_columns(const DeltaCall& a, int64_t t, int64_t n, int64_t first, int64_t count, float* memory) {
  int64_t c = 0;
  for (; c + COLUMNS <= count; c += COLUMNS) update_row<f32x16, COLUMNS / LANES>(a, t, n, first + c, memory + c);
  for (; c + LANES <= count; c += LANES) update_row<f32x16, 1>(a, t, n, first + c, memory + c);
  for (; c < count; ++c) update_row<float, 1>(a, t, n, first + c, memory + c);
}

// Processes all rows of sequence b, for columns `first` to `first + count` of head n.
inline void process_sequence(const DeltaCall& a, int64_t b, int64_t n, int64_t first, int64_t count) {
  int64_t slot = a.slots[b], start = a.starts[b], num_rows = a.starts[b + 1] - start;
  if (slot < 0 || slot >= a.num_slots || num_rows <= 0) return;
  float* memory = a.memory + (slot * a.N + n) * a.H * a.V + first;
  if (a.is_first_step[b])
    for (int64_t h = 0; h < a.H; ++h) std::memset(memory + h * a.V, 0, count * sizeof(float));
  int64_t num_kept = std::min<int64_t>(std::max(a.num_kept[b], 0), num_rows);
  for (int64_t t = 0; t < num_kept; ++t) update_columns(a, start + t, n, first, count, memory);
  if (num_kept == num_rows) return;
  std::unique_ptr<float[]> copy(new float[a.H * a.V]);  // for rows whose memory is not kept, such as draft tokens
  for (int64_t h = 0; h < a.H; ++h) std::memcpy(&copy[h * a.V], memory + h * a.V, count * sizeof(float));
  for (int64_t t = num_kept; t < num_rows; ++t) update_columns(a, start + t, n, first, count, copy.get());
}

inline int64_t items_per_head(const DeltaCall& a) { return (a.V + COLUMNS - 1) / COLUMNS; }

// Processes one of the B * N * items_per_head work items.
inline void process_item(const DeltaCall& a, int64_t index) {
  int64_t item = index % items_per_head(a), head = index / items_per_head(a);
  process_sequence(a, head / a.N, head % a.N, item * COLUMNS, std::min(COLUMNS, a.V - item * COLUMNS));
}

}  // namespace quire::delta
