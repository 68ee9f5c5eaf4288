// Entry to the residual connection.
#include "residual.h"

#include "ffi.h"

namespace quire {
namespace {

// Arrays: x, y, scale and bias of y's norm, scale and bias of the sum's norm. Those after x may be empty.
const char* residual(const Call& call) {
  Buffer x = call.array(0), y = call.array(1), norm_result = call.result(call.num_results() - 1);
  int64_t T = x.dim(0);
  auto row = [&](int i) { return Row{call.array(i).data_or_null<void>(), call.array(i).is_float32()}; };
  auto norm = [&](int first, const char* centred) {
    return Norm{row(first), row(first + 1), call.attribute<int32_t>(centred) != 0, call.attribute<float>("eps")};
  };
  Residual r{x.dim(1), x.is_float32(), x.data<char>(), y.data_or_null<char>(), norm(2, "added_centred"),
             norm(4, "centred")};
  r.norms_y = call.array(2).size() > 0;
  r.sum = call.result().data<char>();
  r.norm = norm_result.data<char>();

  int64_t used_rows = r.keeps_zeros() ? std::max(rows_used(x), r.y ? rows_used(y) : 0) : T;
  int64_t row_bytes = x.bytes() / T;
  for (char* out : {r.sum, r.norm}) std::memset(out + used_rows * row_bytes, 0, (T - used_rows) * row_bytes);
  Pool pool = call.pool();
  for_each_row(pool, used_rows, r.D, [&](int64_t row) { r.process_row(row); });
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS;

}  // namespace

QUIRE_KERNEL(residual,
             {{FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS}, {"added_centred", "centred", "eps"}, FLOATS})

}  // namespace quire
