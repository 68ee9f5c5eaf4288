// A layer's residual as XLA calls it: the sum of rows and of what a block gave, or of its norm, and the norm of the sum.
#include <vector>

#include "norm.h"

namespace quire {
namespace {

// Arrays that a case does not have come empty: what is added, its norm's weights, and a norm's bias.
const char* residual(const Call& call) {
  Buffer x = call.array(0), y = call.array(1), weights[4] = {call.array(2), call.array(3), call.array(4), call.array(5)};
  int64_t T = x.dim(0), D = x.dim(1);
  auto norm_of = [&](int first, const char* centred) {
    auto given = [&](int i) { return weights[i].size() ? weights + i : nullptr; };
    return Norm{given(first), given(first + 1), call.attribute<int32_t>(centred) != 0, call.attribute<float>("eps")};
  };
  const Norm added = norm_of(0, "added_centred"), own = norm_of(2, "centred");
  const bool adds = y.size() > 0;
  const Buffer sums = call.result(0), normed = call.result(call.results() - 1);

  // Padding is zeros at the end, and stays so unless a bias ends that.
  int64_t used = own.bias || added.bias ? T : std::max(rows_used(x), adds ? rows_used(y) : 0);
  for (const Buffer& to : {sums, normed}) std::memset(to.data<char>() + used * (to.bytes() / T), 0, (T - used) * (to.bytes() / T));
  Pool pool = call.pool();
  each_row(pool, used, D, [&](int64_t row) {
    static thread_local std::vector<float> room;
    room.resize(D);
    float* at = room.data();
    Row from(x, row), kept(sums, row);
    Place sum(sums, row), to(normed, row);
    if (adds) {
      Row more(y, row);
      sixteens(D, [&](int64_t k, auto lanes) { keep(at + k, lanes, some(more, k, lanes)); });
      if (added.scale) added.apply(at, D);
      sixteens(D, [&](int64_t k, auto lanes) { sum.put(k, lanes, some(from, k, lanes) + some(at + k, lanes)); });
    }
    const Row& summed = adds ? kept : from;  // as they are kept: it is their norm that is wanted
    sixteens(D, [&](int64_t k, auto lanes) { keep(at + k, lanes, some(summed, k, lanes)); });
    own.apply(at, D);
    sixteens(D, [&](int64_t k, auto lanes) { to.put(k, lanes, some(at + k, lanes)); });
  });
  return nullptr;
}

constexpr auto ANY = dtype::ANY;

}  // namespace

QUIRE_KERNEL(residual, {{ANY, ANY, ANY, ANY, ANY, ANY}, {"added_centred", "centred", "eps"}})

}  // namespace quire
