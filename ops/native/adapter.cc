// What adapters add to products, as XLA calls it.
#include "adapter.h"

#include "ffi.h"

namespace quire {
namespace {

// The products, which the sums replace; rows; their slots; which matrix of a slot's; the adapters; the parts of the outputs.
const char* adapter(const Call& call) {
  Buffer out = call.array(0), x = call.array(1), parts = call.array(7);
  int64_t which = call.array(3).data<int32_t>()[0], each = call.attribute<int32_t>("stack");
  if (which < 0 || which >= each) return "adapter: there is no such matrix in a stack";
  auto stack = [](Buffer of) { return Stack{of.data<char>(), of.wide(), of.dim(1), of.dim(2)}; };
  Stack down = stack(call.array(4)), up = stack(call.array(5));
  float* to = call.result().data<float>();
  if (to != out.data<float>()) std::memcpy(to, out.data<float>(), out.bytes());
  Adapter a{x.dim(0), x.dim(1), out.dim(1), x.data<char>(), x.wide(), call.array(2).data<int32_t>(),
            call.array(4).dim(0) / each, each, which, down, up, call.array(6).data<float>(), parts.data<int32_t>(),
            parts.dim(0), to};
  Pool pool = call.pool();
  down.wide ? a.run<true>(pool) : a.run<false>(pool);
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS;
constexpr auto F32 = dtype::F32, S32 = dtype::S32;

}  // namespace

QUIRE_KERNEL(adapter, {{F32, FLOATS, S32, S32, FLOATS, FLOATS, F32, S32}, {"stack"}, F32})

}  // namespace quire
