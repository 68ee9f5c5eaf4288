// The entries to the products of codes with a scale a group of inputs: -DNAME is the kernel and -DFORMAT its codes.
#include "rows.h"

namespace quire {
namespace {

template <typename Code>
Bytes<Code> weights(Bytes<Code>*, Buffer w, const float* scale, const float* least, const float* sums, int64_t group) {
  return {w.data<uint8_t>(), scale, least, sums, group};
}

template <typename Code>
Nibbles<Code> weights(Nibbles<Code>*, Buffer w, const float* scale, const float* least, const float* sums,
                      int64_t group) {
  return {w.data<uint32_t>(), scale, nullptr, least ? sums : nullptr, group, least};
}

const char* grouped(const Call& call) {
  return grouped_products<FORMAT>(call, [](auto... parts) { return weights(static_cast<FORMAT*>(nullptr), parts...); });
}

}  // namespace

QUIRE_KERNEL(grouped, {{dtype::ANY, CODES, dtype::F32, dtype::F32, dtype::F32, dtype::S32}, {"activation"}})

}  // namespace quire
