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

  Pool pool = call.pool();
  each_row(pool, T, D, [&](int64_t row) {
    static thread_local std::vector<float> room;
    room.resize(D);
    if (adds) {
      Row from(y, row);
      sixteens(D, [&](int64_t k, int64_t lanes) {
        f32x16 part = some(from, k, lanes);
        std::memcpy(room.data() + k, &part, lanes * sizeof(float));
      });
      if (added.scale) added.apply(room.data(), D);
    }
    Row from(x, row);
    Place sum(sums, row), to(normed, row);
    sixteens(D, [&](int64_t k, int64_t lanes) {
      f32x16 part{};
      if (adds) std::memcpy(&part, room.data() + k, lanes * sizeof(float));
      part = some(from, k, lanes) + part;
      if (adds) {  // the norm is that of the sum as it is kept
        sum.put(k, lanes, part);
        part = some(Row(sums, row), k, lanes);
      }
      std::memcpy(room.data() + k, &part, lanes * sizeof(float));
    });
    own.apply(room.data(), D);
    sixteens(D, [&](int64_t k, int64_t lanes) {
      f32x16 part{};
      std::memcpy(&part, room.data() + k, lanes * sizeof(float));
      to.put(k, lanes, part);
    });
  });
  return nullptr;
}

constexpr auto ANY = dtype::ANY;

}  // namespace

QUIRE_KERNEL(residual, {{ANY, ANY, ANY, ANY, ANY, ANY}, {"added_centred", "centred", "eps"}})

}  // namespace quire
