// A layer's heads as XLA calls it.
#include "heads.h"

#include "ffi.h"

namespace quire {
namespace {

// Arrays that a case does not have come empty: cosines and sines, and the norms' scales.
const char* heads(const Call& call) {
  Buffer qkv = call.array(0), cos = call.array(1);
  int64_t T = qkv.dim(0);
  auto number = [&](const char* name) { return call.attribute<int32_t>(name); };
  auto norm = [&](int i) {
    return Norm{{call.array(i).given<void>(), call.array(i).wide()}, {}, false, call.attribute<float>("eps")};
  };
  Heads h{number("queries"), number("keys"), qkv.dim(1), qkv.dim(2), qkv.wide(), qkv.data<char>()};
  h.pairs = cos.size() ? cos.dim(1) : 0, h.cos = cos.data<float>(), h.sin = call.array(2).data<float>();
  h.norm = static_cast<HeadNorms>(number("norm")), h.q_norm = norm(3), h.k_norm = norm(4);
  h.v_norm.eps = h.q_norm.eps, h.tied = number("tied"), h.norms_values = number("value_norm");
  char** to[] = {&h.q, &h.k, &h.v};

  int64_t used = (rows_used(qkv) + h.of_row - 1) / h.of_row;  // zeros at the end stay zeros
  for (int64_t i = 0; i < call.results(); ++i) {
    Buffer out = call.result(i);
    int64_t row = out.bytes() / T;
    *to[i] = out.data<char>();
    std::memset(*to[i] + used * row, 0, (T - used) * row);
  }
  Pool pool = call.pool();
  each_row(pool, used, h.of_row * h.H, [&](int64_t row) { h.row(row); });
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS;
constexpr auto F32 = dtype::F32;

}  // namespace

QUIRE_KERNEL(heads, {{FLOATS, F32, F32, FLOATS, FLOATS}, {"eps", "keys", "norm", "queries", "tied", "value_norm"}, FLOATS})

}  // namespace quire
