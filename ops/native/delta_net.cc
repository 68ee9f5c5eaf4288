// Entry to the gated delta rule.
#include "delta_net.h"

#include "ffi.h"
#include "threads.h"

namespace quire {
namespace {

using namespace delta;

const char* delta_rule(const Call& call) {
  DeltaCall a{};
  Buffer v = call.array(2), q = call.array(0), memory = call.array(5);
  a.T = v.dim(0), a.N = v.dim(1), a.V = v.dim(2), a.K = q.dim(1), a.H = q.dim(2), a.num_slots = memory.dim(0);
  a.q = q.data<float>();
  a.k = call.array(1).data<float>();
  a.v = v.data<float>();
  a.decay = call.array(3).data<float>();
  a.beta = call.array(4).data<float>();
  a.starts = call.array(6).data<int32_t>();
  a.slots = call.array(7).data<int32_t>();
  a.is_first_step = call.array(8).data<int32_t>();
  a.num_kept = call.array(9).data<int32_t>();
  a.corrects = call.attribute<int32_t>("corrects");
  a.by_key = call.attribute<int32_t>("by_key");
  a.out = call.result(0).data<float>();
  a.memory = call.result(1).data<float>();
  if (a.memory != memory.data<float>()) return "delta rule: the memories are not written where they lie";
  int64_t B = call.array(7).dim(0);
  for (int64_t b = 0; b < B; ++b)
    if (a.starts[0] != 0 || a.starts[b + 1] < a.starts[b] || a.starts[b + 1] > a.T)
      return "delta rule: starts_B1 is not a rising list from 0 to at most T";
  int64_t used_rows = a.starts[B];
  std::memset(a.out + used_rows * a.N * a.V, 0, (a.T - used_rows) * a.N * a.V * sizeof(float));
  Pool pool = call.pool();
  parallel(pool, B * a.N * items_per_head(a), [&](int64_t index) { process_item(a, index); });
  return nullptr;
}

constexpr auto F32 = dtype::F32, S32 = dtype::S32;

}  // namespace

QUIRE_KERNEL(delta_rule, {{F32, F32, F32, F32, F32, F32, S32, S32, S32, S32}, {"by_key", "corrects"}, F32})

}  // namespace quire
