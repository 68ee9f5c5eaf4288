// The door to paged attention.
#include "attention.h"

namespace quire {
namespace {

template <typename T>
T* given(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? static_cast<T*>(buffer.untyped_data()) : nullptr;
}

// Arrays that a case does not have come empty: new keys and values where another layer has appended them, values that
// are a part of the keys, the scales of pages that are not int8, sinks.
ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::AnyBuffer k_pages, ffi::AnyBuffer v_pages, ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale,
                           ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> tables,
                           ffi::Buffer<ffi::S32> slots, ffi::AnyBuffer sinks, ffi::Result<ffi::AnyBuffer> out,
                           ffi::RemainingRets written, float scale, float soft_cap, int32_t window) {
  auto rows = q.dimensions(), pages = k_pages.dimensions();
  attention::Call a{};
  a.T = rows[0], a.N = rows[1], a.H = rows[2];
  a.P = pages[0], a.S = pages[1], a.K = pages[2];
  a.V = out->dimensions().back(), a.B = starts.element_count() - 1, a.M = tables.dimensions()[1];
  a.q = q.untyped_data(), a.k = given<void>(k), a.v = given<void>(v), a.wide = q.element_type() == ffi::F32;
  a.k_pages = k_pages.untyped_data(), a.v_pages = given<void>(v_pages);
  a.k_scale = given<float>(k_scale), a.v_scale = given<float>(v_scale);
  a.positions = positions.typed_data(), a.starts = starts.typed_data();
  a.tables = tables.typed_data(), a.slots = slots.typed_data(), a.sinks = given<float>(sinks);
  a.scoring = {scale, soft_cap, window > 0 ? window : int64_t{1} << 40};
  a.out = out->untyped_data();

  for (int64_t b = 0; b < a.B; ++b)
    if (a.starts[0] != 0 || a.starts[b + 1] < a.starts[b] || a.starts[b + 1] > a.T)
      return ffi::Error::InvalidArgument("paged attention: starts_B1 is not a rising list from 0 to at most T");
  void* from[] = {a.k_pages, a.v_pages, a.k_scale, a.v_scale};
  size_t at = 0;
  for (size_t i = 0; i < written.size(); ++i, ++at) {
    auto result = written.get<ffi::AnyBuffer>(i);
    while (at < 3 && !from[at]) ++at;
    if (!result.has_value() || (*result)->untyped_data() != from[at])
      return ffi::Error::Internal("paged attention: the pages are not written where they lie");
  }

  auto spread = [&](int64_t chunks, const auto& run) { parallel(pool, chunks, run); };
  int64_t threads = std::max<int64_t>(1, pool.num_threads());
  if (k_pages.element_type() == ffi::F32)
    attention::attend<float, float>(a, threads, spread);
  else if (k_pages.element_type() == ffi::S8 && a.wide)
    attention::attend<int8_t, float>(a, threads, spread);
  else if (k_pages.element_type() == ffi::S8)
    attention::attend<int8_t, uint16_t>(a, threads, spread);
  else if (a.wide)
    attention::attend<uint16_t, float>(a, threads, spread);
  else
    attention::attend<uint16_t, uint16_t>(a, threads, spread);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_attention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window"));

#pragma GCC visibility pop

}  // namespace quire
