// The entry to the products of NF4 weights.
#include "rows.h"

namespace quire {
namespace {

const char* nf4(const Call& call) {
  return products<Nf4>(call, [](const Product& p) {
    Buffer scale = p.weight(2);
    return Nf4{p.weight().data<uint32_t>(), scale.data<float>(), nullptr, nullptr, p.inputs() / scale.dim(1)};
  });
}

}  // namespace

QUIRE_KERNEL(nf4, {{dtype::ANY, dtype::U32, dtype::F32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
