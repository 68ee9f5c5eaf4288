// The gated delta rule: a head of a sequence is one task, or a part of its columns. The columns of a memory do not meet,
// so each is computed by itself from the first row to the last, and no order of sums depends on who else is there.
#include "common.h"
#include "ffi.h"

namespace quire {
namespace {

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

template <typename Vector>
void put(float* p, Vector x) {
  std::memcpy(p, &x, sizeof(x));
}

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

void columns(const Work& w, int64_t t, int64_t n, int64_t first, int64_t count, float* m) {
  int64_t at = 0;
  for (; at + COLUMNS <= count; at += COLUMNS) row<f32x16, COLUMNS / LANES>(w, t, n, first + at, m + at);
  for (; at + LANES <= count; at += LANES) row<f32x16, 1>(w, t, n, first + at, m + at);
  for (; at < count; ++at) row<float, 1>(w, t, n, first + at, m + at);
}

void task(const Work& w, int64_t b, int64_t n, int64_t first, int64_t count) {
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

const char* delta_rule(const Call& call) {
  Work w{};
  Buffer v = call.array(2), q = call.array(0), memory = call.array(5);
  w.T = v.dim(0), w.N = v.dim(1), w.V = v.dim(2), w.K = q.dim(1), w.H = q.dim(2), w.slots = memory.dim(0);
  w.q = q.data<float>(), w.k = call.array(1).data<float>(), w.v = v.data<float>();
  w.decay = call.array(3).data<float>(), w.beta = call.array(4).data<float>();
  w.starts = call.array(6).data<int32_t>(), w.slot = call.array(7).data<int32_t>();
  w.begins = call.array(8).data<int32_t>(), w.kept = call.array(9).data<int32_t>();
  w.corrects = call.attribute<int32_t>("corrects"), w.by_key = call.attribute<int32_t>("by_key");
  w.out = call.result(0).data<float>(), w.memory = call.result(1).data<float>();
  if (w.memory != memory.data<float>()) return "delta rule: the memories are not written where they lie";
  int64_t B = call.array(7).dim(0), parts = (w.V + COLUMNS - 1) / COLUMNS;
  for (int64_t b = 0; b < B; ++b)
    if (w.starts[0] != 0 || w.starts[b + 1] < w.starts[b] || w.starts[b + 1] > w.T)
      return "delta rule: starts_B1 is not a rising list from 0 to at most T";
  int64_t last = w.starts[B];
  std::memset(w.out + last * w.N * w.V, 0, (w.T - last) * w.N * w.V * sizeof(float));
  Pool pool = call.pool();
  parallel(pool, B * w.N * parts, [&](int64_t chunk) {
    int64_t part = chunk % parts, head = chunk / parts;
    task(w, head / w.N, head % w.N, part * COLUMNS, std::min(COLUMNS, w.V - part * COLUMNS));
  });
  return nullptr;
}

constexpr auto F32 = dtype::F32, S32 = dtype::S32;

}  // namespace

QUIRE_KERNEL(delta_rule, {{F32, F32, F32, F32, F32, F32, S32, S32, S32, S32}, {"by_key", "corrects"}})

}  // namespace quire
