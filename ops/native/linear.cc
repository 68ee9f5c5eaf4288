// The doors to the weight products: one for each format.
#include "linear.h"

#include <cmath>
#include <vector>

namespace quire {
namespace {

template <typename T>
T* data(ffi::AnyBuffer buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

int64_t rows_in(ffi::AnyBuffer x) { return x.element_count() / x.dimensions().back(); }

// Rows up to the last that is not all zeros: the padding of a step is, and its products are known.
int64_t rows_used(ffi::AnyBuffer x) {
  int64_t T = rows_in(x), size = x.dimensions().back() * (x.element_type() == ffi::F32 ? 2 : 1);
  auto empty = [&](int64_t row) {
    const uint16_t* at = data<uint16_t>(x) + row * size;
    uint16_t any = 0;
    for (int64_t i = 0; i < size; ++i) any |= at[i];
    return !any;
  };
  while (T > 0 && empty(T - 1)) --T;
  return T;
}

// Work on every row, spread over the threads where there is enough of it.
template <typename Run>
void each_row(ffi::ThreadPool& pool, int64_t T, int64_t K, const Run& run) {
  int64_t rows = std::max<int64_t>(1, (32 << 10) / K);
  parallel(pool, (T + rows - 1) / rows, [&](int64_t chunk) {
    for (int64_t row = chunk * rows; row < std::min(T, (chunk + 1) * rows); ++row) run(row);
  });
}

// The rows in the type that a product wants, their ends filled up with zeros.
template <typename X>
struct Padded {
  std::vector<X> own;
  const X* rows;

  Padded(ffi::ThreadPool& pool, ffi::AnyBuffer x, int64_t T, int64_t K) {
    int64_t from = x.dimensions().back();
    bool same = x.element_type() == (sizeof(X) == 2 ? ffi::BF16 : ffi::F32);
    rows = data<X>(x);
    if (same && from == K) return;
    own.resize(T * K);
    rows = own.data();
    each_row(pool, T, K, [&](int64_t row) {
      X* out = own.data() + row * K;
      for (int64_t k = 0; k < from; ++k)
        if (same)
          out[k] = data<X>(x)[row * from + k];
        else if constexpr (sizeof(X) == 2)
          out[k] = narrow(data<float>(x)[row * from + k]);
        else
          out[k] = widen(data<uint16_t>(x)[row * from + k]);
    });
  }
};

// A row in float32, from either type.
struct Row {
  const void* at;
  bool wide;

  Row(ffi::AnyBuffer x, int64_t row) : wide(x.element_type() == ffi::F32) {
    at = static_cast<const char*>(x.untyped_data()) + row * x.dimensions().back() * (wide ? 4 : 2);
  }
  f32x16 sixteen(int64_t k) const {
    return wide ? load(static_cast<const float*>(at) + k) : load_wide(static_cast<const uint16_t*>(at) + k);
  }
  float one(int64_t k) const {
    return wide ? static_cast<const float*>(at)[k] : widen(static_cast<const uint16_t*>(at)[k]);
  }
};

// Each row as signed bytes and a scale, such that its largest value is 127; a row that is not finite gets such a scale.
struct Bytes {
  std::vector<uint8_t> rows;
  std::vector<float> scale;

  Bytes(ffi::ThreadPool& pool, ffi::AnyBuffer x, int64_t T, int64_t K) : rows(T * K, BIAS), scale(T) {
    int64_t from = x.dimensions().back(), whole = from / LANES * LANES;
    const float round = 12582912.0f;  // see `exp`
    each_row(pool, T, K, [&](int64_t row) {
      Row in(x, row);
      f32x16 most{}, poison{};
      for (int64_t k = 0; k < whole; k += LANES) {
        f32x16 v = in.sixteen(k), size = (f32x16)((u32x16)v & 0x7fffffffu);
        most = size > most ? size : most;
        poison += v * 0.0f;
      }
      float largest = 0, spoilt = 0;
      for (int i = 0; i < LANES; ++i) largest = std::max(largest, most[i]), spoilt += poison[i];
      for (int64_t k = whole; k < from; ++k) largest = std::max(largest, std::fabs(in.one(k))), spoilt += in.one(k) * 0;
      scale[row] = largest / 127.0f + spoilt;
      float inverse = largest > 0 ? 127.0f / largest : 0.0f;
      uint8_t* out = rows.data() + row * K;
      for (int64_t k = 0; k < whole; k += LANES) {
        u8x16 bytes = __builtin_convertvector((u32x16)(in.sixteen(k) * inverse + round) - 0x4b400000u + BIAS, u8x16);
        std::memcpy(out + k, &bytes, LANES);
      }
      for (int64_t k = whole; k < from; ++k) {
        float shifted = in.one(k) * inverse + round;
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        out[k] = static_cast<uint8_t>(bits - 0x4b400000u + BIAS);
      }
    });
  }
};

Out out_of(ffi::Result<ffi::AnyBuffer> y, ffi::Buffer<ffi::F32> bias, int64_t blocks, int32_t activation) {
  const float* b = bias.element_count() ? bias.typed_data() : nullptr;
  int64_t O = y->dimensions().back();
  return {y->untyped_data(), y->element_type() == ffi::F32, b, O, activation ? blocks / 2 : blocks, activation};
}

ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> bias,
                 ffi::Result<ffi::AnyBuffer> y, int32_t activation) {
  auto shape = w.dimensions();
  int64_t T = rows_used(x);
  Out out = out_of(y, bias, shape[0], activation);
  if (w.element_type() == ffi::F32) {
    int64_t K = shape[1];
    product(pool, F32{data<float>(w)}, Padded<float>(pool, x, T, K).rows, T, K, out);
  } else {
    int64_t K = shape[1] * 2;
    product(pool, Bf16{data<uint16_t>(w)}, Padded<uint16_t>(pool, x, T, K).rows, T, K, out);
  }
  out.fill(T, rows_in(x));
  return ffi::Error::Success();
}

ffi::Error int8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F32> scale,
                ffi::Buffer<ffi::S32> sum, ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y,
                int32_t activation) {
  auto shape = w.dimensions();
  int64_t T = rows_used(x), K = shape[1] * shape[3];
  Out out = out_of(y, bias, shape[0], activation);
  if (shape[3] == 2) {
    product(pool, Int8Wide{w.typed_data(), scale.typed_data()}, Padded<uint16_t>(pool, x, T, K).rows, T, K, out);
  } else {
    Bytes bytes(pool, x, T, K);
    Int8 f{w.typed_data(), scale.typed_data(), sum.typed_data(), bytes.scale.data()};
    product(pool, f, bytes.rows.data(), T, K, out);
  }
  out.fill(T, rows_in(x));
  return ffi::Error::Success();
}

ffi::Error int4(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> w, ffi::Buffer<ffi::F16> scale,
                ffi::Buffer<ffi::U8> zero, ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y,
                int32_t activation) {
  int64_t T = rows_used(x), K = w.dimensions()[1] * 8, groups = scale.dimensions()[1], group = K / groups;
  Out out = out_of(y, bias, w.dimensions()[0], activation);
  Padded<uint16_t> padded(pool, x, T, K);
  const uint8_t* zeros = zero.element_count() ? zero.typed_data() : nullptr;
  bool summed = zeros || MADE != -8;
  std::vector<float> sums(summed ? T * groups : 0);
  each_row(pool, summed ? T : 0, K, [&](int64_t row) {
    for (int64_t g = 0; g < groups; ++g) {
      f32x16 sum{};
      const uint16_t* at = padded.rows + row * K + g * group;
      for (int64_t k = 0; k < group; k += LANES) sum += load_wide(at + k);
      for (int i = 0; i < LANES; ++i) sums[row * groups + g] += sum[i];
    }
  });
  Int4 f{w.typed_data(), reinterpret_cast<const uint16_t*>(scale.typed_data()), zeros, summed ? sums.data() : nullptr,
         group};
  product(pool, f, padded.rows, T, K, out);
  out.fill(T, rows_in(x));
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

// Whether the instructions that this was compiled for may be used.
extern "C" int quire_permitted() {
#if defined(QUIRE_AMX)
  return amx::permitted();
#else
  return 1;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_dense, dense,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_int8, int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(quire_int4, int4,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F16>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("activation"));

#pragma GCC visibility pop

}  // namespace quire
