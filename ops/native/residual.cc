// A layer's residual as XLA calls it.
#include "residual.h"

#include "ffi.h"

namespace quire {
namespace {

// Arrays that a case does not have come empty: what is added, its norm's weights, and a norm's bias.
const char* residual(const Call& call) {
  Buffer x = call.array(0), y = call.array(1), last = call.result(call.results() - 1);
  int64_t T = x.dim(0);
  auto row = [&](int i) { return Row{call.array(i).given<void>(), call.array(i).wide()}; };
  auto norm = [&](int first, const char* centred) {
    return Norm{row(first), row(first + 1), call.attribute<int32_t>(centred) != 0, call.attribute<float>("eps")};
  };
  Residual r{x.dim(1), x.wide(), x.data<char>(), y.given<char>(), norm(2, "added_centred"), norm(4, "centred")};
  r.normed = call.array(2).size() > 0, r.sum = call.result().data<char>(), r.norm = last.data<char>();

  int64_t used = r.keeps_zeros() ? std::max(rows_used(x), r.y ? rows_used(y) : 0) : T, row_bytes = x.bytes() / T;
  for (char* to : {r.sum, r.norm}) std::memset(to + used * row_bytes, 0, (T - used) * row_bytes);
  Pool pool = call.pool();
  each_row(pool, used, r.D, [&](int64_t number) { r.row(number); });
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS;

}  // namespace

QUIRE_KERNEL(residual,
             {{FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS}, {"added_centred", "centred", "eps"}, FLOATS})

}  // namespace quire
