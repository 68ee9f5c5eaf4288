// The gated delta rule: a head of a sequence is one task, or a part of its columns. The columns of a memory do not meet,
// so each is computed by itself from the first row to the last, and no order of sums depends on who else is there.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>

#include "common.h"

namespace quire::delta {

constexpr int64_t COLUMNS = 2 * LANES;  // of a task

struct Work {
  int64_t T, K, H, N, V, slots;
  const float *q, *k, *v, *decay, *beta;
  const int32_t *starts, *slot, *begins, *kept;
  float *memory, *out;
  bool corrects, by_key;  // by_key: each number of a key has a decay of its own
};

// Vectors of sixteen columns, or single ones where a head's size is no multiple of sixteen.
template <typename Vector>
Vector get(const float* p) {
  return lanes<Vector>(p);
}
template <>
inline f32x16 get(const float* p) {
  return load(p);
}

template <typename Vector>
void put(float* p, Vector x) {
  std::memcpy(p, &x, sizeof(x));
}
inline void put(float* p, f32x16 x) { store(p, x); }

// One row of a head: `m` are the memory's columns, `V` numbers from one row of it to the next.
template <typename Vector, int COUNT>
void row(const Work& w, int64_t t, int64_t n, int64_t column, float* m) {
  const float* k = w.k + (t * w.K + n / (w.N / w.K)) * w.H;
  const float* q = w.q + (t * w.K + n / (w.N / w.K)) * w.H;
  const float* decay = w.decay + (t * w.N + n) * (w.by_key ? w.H : 1);
  const float beta = w.beta[t * w.N + n];
  constexpr int64_t SIZE = sizeof(Vector) / 4;
  Vector said[COUNT] = {}, read[COUNT] = {}, error[COUNT];
  for (int64_t h = 0; h < w.H; ++h)
    for (int c = 0; c < COUNT; ++c) {
      float* at = m + h * w.V + c * SIZE;
      Vector faded = get<Vector>(at) * decay[w.by_key ? h : 0];
      said[c] += faded * k[h];
      put(at, faded);
    }
  for (int c = 0; c < COUNT; ++c) {
    error[c] = get<Vector>(w.v + (t * w.N + n) * w.V + column + c * SIZE);
    error[c] = (w.corrects ? error[c] - said[c] : error[c]) * beta;
  }
  for (int64_t h = 0; h < w.H; ++h)
    for (int c = 0; c < COUNT; ++c) {
      float* at = m + h * w.V + c * SIZE;
      Vector right = get<Vector>(at) + error[c] * k[h];
      read[c] += right * q[h];
      put(at, right);
    }
  for (int c = 0; c < COUNT; ++c) put(w.out + (t * w.N + n) * w.V + column + c * SIZE, read[c]);
}

inline void columns(const Work& w, int64_t t, int64_t n, int64_t first, int64_t count, float* m) {
  int64_t at = 0;
  for (; at + COLUMNS <= count; at += COLUMNS) row<f32x16, COLUMNS / LANES>(w, t, n, first + at, m + at);
  for (; at + LANES <= count; at += LANES) row<f32x16, 1>(w, t, n, first + at, m + at);
  for (; at < count; ++at) row<float, 1>(w, t, n, first + at, m + at);
}

inline void task(const Work& w, int64_t b, int64_t n, int64_t first, int64_t count) {
  int64_t slot = w.slot[b], start = w.starts[b], rows = w.starts[b + 1] - start;
  if (slot < 0 || slot >= w.slots || rows <= 0) return;
  float* memory = w.memory + (slot * w.N + n) * w.H * w.V + first;
  if (w.begins[b])
    for (int64_t h = 0; h < w.H; ++h) std::memset(memory + h * w.V, 0, count * sizeof(float));
  int64_t kept = std::min<int64_t>(std::max(w.kept[b], 0), rows);
  for (int64_t t = 0; t < kept; ++t) columns(w, start + t, n, first, count, memory);
  if (kept == rows) return;
  std::unique_ptr<float[]> copy(new float[w.H * w.V]);  // rows whose memory is not kept
  for (int64_t h = 0; h < w.H; ++h) std::memcpy(&copy[h * w.V], memory + h * w.V, count * sizeof(float));
  for (int64_t t = kept; t < rows; ++t) columns(w, start + t, n, first, count, copy.get());
}

// The parts of a head, and one of the tasks of `B` sequences.
inline int64_t parts(const Work& w) { return (w.V + COLUMNS - 1) / COLUMNS; }

inline void chunk(const Work& w, int64_t number) {
  int64_t part = number % parts(w), head = number / parts(w);
  task(w, head / w.N, head % w.N, part * COLUMNS, std::min(COLUMNS, w.V - part * COLUMNS));
}

}  // namespace quire::delta
