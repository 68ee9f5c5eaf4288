// The entries to the products of codes with a scale a group of inputs: -DFORMAT is a kernel's format.
#include "rows.h"

namespace quire {
namespace {

const char* grouped(const Call& call) {
  return grouped_products<FORMAT>(call, [](const Product& p, int64_t) {
    return Shared<Wide>{Wide(p.weight(2).data<float>()), Wide(p.weight(3).given<float>())};
  });
}

}  // namespace

QUIRE_KERNEL(grouped, {{dtype::FLOATS, CODES, dtype::F32, dtype::F32, dtype::F32, dtype::S32}, {"activation"}, dtype::FLOATS})

}  // namespace quire
