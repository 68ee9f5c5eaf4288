// Entry to paged attention. PAGE is the type of keys and values in the cache; ROW is the type in which keys are
// multiplied with queries, and the type of queries and results (float32 pages take both types).
#include "attention.h"
#include "ffi.h"
#include "threads.h"

namespace quire {
namespace {

bool is_page_array(Buffer x) {
  if (sizeof(PAGE) == 2) return x.type() == dtype::U16 || x.type() == dtype::BF16;
  return x.type() == (sizeof(PAGE) == 4 ? dtype::F32 : attention::ELEMENT_DIMS<PAGE> == 2 ? dtype::U8 : dtype::S8);
}

bool is_query_array(Buffer x) {
  return x.is_float32() ? attention::ALLOWS_FLOAT32<ROW>
                        : x.type() == dtype::BF16 && attention::ALLOWS_BF16<PAGE, ROW>;
}

// Empty arrays stand for absent ones: new keys and values that another layer has appended, values that are a part of
// the keys, scales of float pages, sinks, what rows see.
const char* paged_attention(const Call& call) {
  Buffer q = call.array(0), k_pages = call.array(3), starts = call.array(8), out = call.result();
  if (!is_query_array(q) || !is_page_array(k_pages) || !is_page_array(call.array(4)))
    return "paged attention: this kernel is for arrays of other types";
  attention::AttentionCall a{};
  a.T = q.dim(0), a.N = q.dim(1), a.H = q.dim(2);
  a.P = k_pages.dim(0), a.S = k_pages.dim(1), a.K = k_pages.dim(2);
  a.V = out.last_dim(), a.B = starts.size() - 1, a.M = call.array(9).dim(1);
  a.q = q.data<void>();
  a.k = call.array(1).data_or_null<void>();
  a.v = call.array(2).data_or_null<void>();
  a.is_float32 = q.is_float32();
  a.k_pages = k_pages.data<void>();
  a.v_pages = call.array(4).data_or_null<void>();
  a.k_scale = call.array(5).data_or_null<float>();
  a.v_scale = call.array(6).data_or_null<float>();
  a.positions = call.array(7).data<int32_t>();
  a.starts = starts.data<int32_t>();
  a.tables = call.array(9).data<int32_t>();
  a.slots = call.array(10).data<int32_t>();
  a.sinks = call.array(11).data_or_null<float>();
  a.sees = call.array(12).data_or_null<int32_t>();
  int32_t window = call.attribute<int32_t>("window");
  a.scoring = {call.attribute<float>("scale"), call.attribute<float>("soft_cap"), int64_t{1} << 40};
  if (window > 0) a.scoring.window = window, a.scoring.chunked = call.attribute<int32_t>("chunked");
  a.scoring.lookahead = call.attribute<int32_t>("ahead");
  a.out = out.data<void>();

  for (int64_t b = 0; b < a.B; ++b)
    if (a.starts[0] != 0 || a.starts[b + 1] < a.starts[b] || a.starts[b + 1] > a.T)
      return "paged attention: starts_B1 is not a rising list from 0 to at most T";
  void* pages[] = {a.k_pages, a.v_pages, a.k_scale, a.v_scale};
  int next_page_array = 0;
  for (int64_t i = 1; i < call.num_results(); ++i, ++next_page_array) {
    while (next_page_array < 3 && !pages[next_page_array]) ++next_page_array;
    if (call.result(i).data<void>() != pages[next_page_array])
      return "paged attention: the pages are not written where they lie";
  }

  Pool pool = call.pool();
  auto run_parallel = [&](int64_t chunks, const auto& run) { parallel(pool, chunks, run); };
  attention::attend<PAGE, ROW>(a, std::max<int64_t>(1, pool.num_threads()), run_parallel);
  return nullptr;
}

constexpr auto FLOATS = dtype::FLOATS, ANY = dtype::ANY;
constexpr auto S32 = dtype::S32, F32 = dtype::F32;

}  // namespace

QUIRE_KERNEL(paged_attention, {{FLOATS, FLOATS, FLOATS, ANY, ANY, F32, F32, S32, S32, S32, S32, F32, S32},
                               {"ahead", "chunked", "scale", "soft_cap", "window"}})

}  // namespace quire
