// Splits a buffer of 32-bit words into arrays. XLA would compile a loop for each array.
#include "ffi.h"

namespace quire {
namespace {

const char* unpack(const Call& call) {
  const int32_t* source = call.array(0).data<int32_t>();
  int64_t remaining = call.array(0).size();
  for (int64_t i = 0; i < call.num_results(); ++i) {
    Buffer out = call.result(i);
    int64_t num_words = out.size();
    if (num_words > remaining) return "the buffer is shorter than its arrays";
    if (out.type() == dtype::PRED)
      for (int64_t n = 0; n < num_words; ++n) out.data<bool>()[n] = source[n] != 0;
    else if (out.bytes() != num_words * 4)
      return "an array that is neither of words nor of truth values";
    else if (num_words)
      std::memcpy(out.data<char>(), source, num_words * 4);
    source += num_words;
    remaining -= num_words;
  }
  return remaining ? "the buffer is longer than its arrays" : nullptr;
}

}  // namespace

QUIRE_KERNEL(unpack, {{dtype::S32}, {}})

}  // namespace quire
