// Entry to the processing of attention heads.
#include "heads.h"

#include "ffi.h"

namespace quire {
namespace {

// Arrays: qkv, cos, sin, scales of the query norm and of the key norm. All but qkv may be empty.
const char* heads(const Call& call) {
  Buffer qkv = call.array(0), cos = call.array(1);
  int64_t T = qkv.dim(0);
  auto attribute = [&](const char* name) { return call.attribute<int32_t>(name); };
  auto norm = [&](int i) {
    return Norm{
        {call.array(i).data_or_null<void>(), call.array(i).is_float32()}, {}, false, call.attribute<float>("eps")};
  };
  Heads h{attribute("queries"), attribute("keys"), qkv.dim(1), qkv.dim(2), qkv.is_float32(), qkv.data<char>()};
  h.pairs = cos.size() ? cos.dim(1) : 0;
  h.cos = cos.data<float>();
  h.sin = call.array(2).data<float>();
  h.norm = static_cast<HeadNorms>(attribute("norm"));
  h.q_norm = norm(3);
  h.k_norm = norm(4);
  h.v_norm.eps = h.q_norm.eps;
  h.tied = attribute("tied");
  h.norms_values = attribute("value_norm");
  char** outputs[] = {&h.q, &h.k, &h.v};

  int64_t used_rows = (rows_used(qkv) + h.qkv_heads - 1) / h.qkv_heads;  // zeros at the end stay zeros
  for (int64_t i = 0; i < call.num_results(); ++i) {
    Buffer out = call.result(i);
    int64_t row_bytes = out.bytes() / T;
    *outputs[i] = out.data<char>();
    std::memset(*outputs[i] + used_rows * row_bytes, 0, (T - used_rows) * row_bytes);
  }
  Pool pool = call.pool();
  for_each_row(pool, used_rows, h.qkv_heads * h.H, [&](int64_t row) { h.process_row(row); });
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS;
constexpr auto F32 = dtype::F32;

}  // namespace

QUIRE_KERNEL(heads, {{FLOATS, F32, F32, FLOATS, FLOATS},
                     {"eps", "keys", "norm", "queries", "tied", "value_norm"},
                     FLOATS})

}  // namespace quire
