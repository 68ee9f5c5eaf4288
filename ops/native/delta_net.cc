// The gated delta rule as XLA calls it.
#include "delta_net.h"

#include "ffi.h"
#include "threads.h"

namespace quire {
namespace {

using namespace delta;

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
  int64_t B = call.array(7).dim(0);
  for (int64_t b = 0; b < B; ++b)
    if (w.starts[0] != 0 || w.starts[b + 1] < w.starts[b] || w.starts[b + 1] > w.T)
      return "delta rule: starts_B1 is not a rising list from 0 to at most T";
  int64_t last = w.starts[B];
  std::memset(w.out + last * w.N * w.V, 0, (w.T - last) * w.N * w.V * sizeof(float));
  Pool pool = call.pool();
  parallel(pool, B * w.N * parts(w), [&](int64_t number) { chunk(w, number); });
  return nullptr;
}

constexpr auto F32 = dtype::F32, S32 = dtype::S32;

}  // namespace

QUIRE_KERNEL(delta_rule, {{F32, F32, F32, F32, F32, F32, S32, S32, S32, S32}, {"by_key", "corrects"}, F32})

}  // namespace quire
