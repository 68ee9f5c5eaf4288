// The arrays that lie one after the other in a buffer of words. XLA would compile a loop for each.
#include "ffi.h"

namespace quire {
namespace {

const char* unpack(const Call& call) {
  const int32_t* at = call.array(0).data<int32_t>();
  int64_t left = call.array(0).size();
  for (int64_t i = 0; i < call.num_results(); ++i) {
    Buffer to = call.result(i);
    int64_t words = to.size();
    if (words > left) return "the buffer is shorter than its arrays";
    if (to.type() == dtype::PRED)
      for (int64_t n = 0; n < words; ++n) to.data<bool>()[n] = at[n] != 0;
    else if (to.bytes() != words * 4)
      return "an array that is neither of words nor of truth values";
    else if (words)
      std::memcpy(to.data<char>(), at, words * 4);
    at += words, left -= words;
  }
  return left ? "the buffer is longer than its arrays" : nullptr;
}

}  // namespace

QUIRE_KERNEL(unpack, {{dtype::S32}, {}})

}  // namespace quire
