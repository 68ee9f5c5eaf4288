// Entries to the products with codes that have two-level scales, such as GGUF's K-quants: FORMAT is the format.
#include "rows.h"

namespace quire {
namespace {

const char* levels(const Call& call) {
  return run_grouped_products<FORMAT>(call, [](const ProductCall& p, int64_t group_size) {
    auto scale = [&](int64_t i) {
      return TwoLevelScale{p.weight(i).data_or_null<int8_t>(), p.weight(i + 2).data_or_null<uint16_t>(),
                           TwoLevelScale::SUPER_BLOCK / group_size};
    };
    return GroupParams<TwoLevelScale>{scale(2), scale(3)};
  });
}

}  // namespace

QUIRE_KERNEL(levels, {{dtype::FLOATS, dtype::U32, dtype::S8, dtype::S8, dtype::F16, dtype::F16, dtype::F32, dtype::S32},
                      {"activation"}, dtype::FLOATS})

}  // namespace quire
