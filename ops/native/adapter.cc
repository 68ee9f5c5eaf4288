// Entry to the adapters.
#include "adapter.h"

#include "ffi.h"

namespace quire {
namespace {

// Arrays: products (whose memory the results may reuse), rows, slots of rows, index of the matrix, down, up, DoRA
// gains, bounds of the outputs' parts.
const char* adapter(const Call& call) {
  Buffer out = call.array(0), x = call.array(1), bounds = call.array(7);
  int64_t slot_matrix = call.array(3).data<int32_t>()[0], slot_matrices = call.attribute<int32_t>("stack");
  if (slot_matrix < 0 || slot_matrix >= slot_matrices) return "adapter: there is no such matrix in a stack";
  auto stack = [](Buffer array) {
    return Stack{array.data<char>(), array.is_float32(), array.dim(1), array.dim(2)};
  };
  Stack down = stack(call.array(4)), up = stack(call.array(5));
  float* result = call.result().data<float>();
  if (result != out.data<float>()) std::memcpy(result, out.data<float>(), out.bytes());
  Adapter a{x.dim(0), x.dim(1), out.dim(1), x.data<char>(), x.is_float32(), call.array(2).data<int32_t>(),
            call.array(4).dim(0) / slot_matrices, slot_matrices, slot_matrix, down, up, call.array(6).data<float>(),
            bounds.data<int32_t>(), bounds.dim(0), result};
  Pool pool = call.pool();
  down.is_float32 ? a.run<true>(pool) : a.run<false>(pool);
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS;
constexpr auto F32 = dtype::F32, S32 = dtype::S32;

}  // namespace

QUIRE_KERNEL(adapter, {{F32, FLOATS, S32, S32, FLOATS, FLOATS, F32, S32}, {"stack"}, F32})

}  // namespace quire
