// Arrays of zeros that take memory only when they are written to: the system maps a page at its first access.
#include <sys/mman.h>
#include <unistd.h>

#include "ffi.h"

namespace quire {
namespace {

// Releases pages, which XLA may have used before; Linux replaces them with zero pages. Returns whether that succeeded.
bool release_pages(char* start, int64_t size) {
#if defined(__linux__)
  *start = 1;  // remains if the mapping is not private anonymous memory
  return !madvise(start, size, MADV_DONTNEED) && !*start;
#else
  return false;
#endif
}

void clear(char* begin, int64_t size) {
  int64_t page = sysconf(_SC_PAGESIZE);
  int64_t head = -reinterpret_cast<intptr_t>(begin) & (page - 1);  // bytes before the first full page
  int64_t page_bytes = size > head ? (size - head) / page * page : 0;
  if (page_bytes && release_pages(begin + head, page_bytes)) {
    std::memset(begin, 0, head);
    std::memset(begin + head + page_bytes, 0, size - head - page_bytes);
  } else {
    std::memset(begin, 0, size);
  }
}

const char* blank(const Call& call) {
  clear(call.result().data<char>(), call.result().bytes());
  return nullptr;
}

}  // namespace

QUIRE_KERNEL(blank, {{}, {}})

}  // namespace quire
