// Entries to the products: conversion of rows to a format's type, products with a stack of matrices, and quantisation
// of rows.
#pragma once

#include <vector>

#include "ffi.h"
#include "group_integers.h"
#include "linear.h"
#include "norm.h"

namespace quire {

inline Row input_row(Buffer x, int64_t row) {
  return {x.data<char>() + row * x.last_dim() * (x.is_float32() ? 4 : 2), x.is_float32()};
}

// T rows in a format's type, padded with zeros to K values. They are copied only if they must be converted.
template <typename Format>
struct PaddedRows {
  using X = typename Format::X;
  std::vector<X> storage;
  const X* rows;

  PaddedRows(Pool& pool, Buffer x, int64_t T, int64_t K) {
    int64_t size = x.last_dim();
    rows = x.data<X>();
    if (size == K && x.is_float32() == (sizeof(X) == 4) && !(x.is_float32() && Format::ROUNDS_ROWS)) return;
    storage.resize(T * K);
    rows = storage.data();
    for_each_row(pool, T, K, [&](int64_t row) {
      X* out = storage.data() + row * K;
      if (x.is_float32())
        copy(x.data<float>() + row * size, size, out);
      else
        copy(x.data<uint16_t>() + row * size, size, out);
    });
  }

  template <typename From>
  static void copy(const From* in, int64_t count, X* out) {
    for (int64_t k = 0; k < count; ++k)
      if constexpr (std::is_same_v<From, X> && !(sizeof(X) == 4 && Format::ROUNDS_ROWS))
        out[k] = in[k];
      else if constexpr (sizeof(X) == 2)
        out[k] = float_to_bf16(in[k]);
      else if constexpr (sizeof(From) == 2)
        out[k] = bf16_to_float(in[k]);
      else
        out[k] = bf16_to_float(float_to_bf16(in[k]));
  }
};

// Sums of rows over groups of inputs, [T, num_groups].
inline std::vector<float> group_sums(Pool& pool, const RowValue* rows, int64_t T, int64_t K, int64_t group_size) {
  int64_t num_groups = K / group_size;
  std::vector<float> sums(T * num_groups);
  for_each_row(pool, T, K, [&](int64_t row) {
    for (int64_t g = 0; g < num_groups; ++g) {
      f32x16 sum{};
      for_each_16(group_size, [&](int64_t k, auto count) {
        sum += load_partial(Row{rows + row * K + g * group_size, sizeof(RowValue) == 4}, k, count);
      });
      float array[LANES];
      store(array, sum);
      for (float value : array) sums[row * num_groups + g] += value;
    }
  });
  return sums;
}

// Copies WORD_INPUTS bytes in the order of the format's unpacked codes.
template <typename Codes>
inline void reorder(const uint8_t* in, int8_t* out) {
#if defined(__SSSE3__)
  if constexpr (Codes::WORD_INPUTS == 8) {
    __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(Codes::ORDER));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out),
                     _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)), order));
    return;
  } else if constexpr (Codes::WORD_INPUTS == 16) {
    __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Codes::ORDER));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)), order));
    return;
  }
#endif
  for (int64_t i = 0; i < Codes::WORD_INPUTS; ++i) out[i] = static_cast<int8_t>(in[Codes::ORDER[i]]);
}

// Quantises rows for a `GroupQuantisedInt` format. `code_offset` is the constant by which each weight byte exceeds its
// value.
template <typename Format>
QuantisedRows<Format::PLANES> quantise_rows(Pool& pool, Buffer x, int64_t T, int64_t K, int64_t group_size,
                                            int code_offset) {
  constexpr int PLANES = Format::PLANES;
  constexpr int64_t WORD_INPUTS = Format::WORD_INPUTS;
  int64_t size = x.last_dim(), num_groups = K / group_size;
  auto num_scales = static_cast<size_t>(T * num_groups);
  std::vector<float> zeros(num_scales);
  // The largest code of int16 that signed bytes represent, or less where the sum over a group could overflow int32.
  const float max_code = std::min<int64_t>(127 * 257, INT32_MAX / (Format::MAX_BYTE * group_size));
  QuantisedRows<PLANES> rows{std::vector<typename Format::X>(T * K), zeros, zeros, std::vector<int32_t>(num_scales)};
  for_each_row(pool, T, K, [&](int64_t row) {
    std::vector<uint8_t> planes(PLANES * group_size);
    for (int64_t g = 0; g < num_groups && g * group_size < size; ++g) {
      int64_t index = row * num_groups + g, start = g * group_size, stop = std::min(size, start + group_size);
      if (stop < start + group_size) std::fill(planes.begin(), planes.end(), 0);
      Row::Quantised group;
      if constexpr (PLANES == 1)
        group = input_row(x, row).quantise_int8(start, stop, planes.data(), 0);
      else
        group = input_row(x, row).quantise_int16(start, stop, max_code, planes.data(), planes.data() + group_size);
      auto* out = reinterpret_cast<int8_t*>(rows.values.data() + row * K + start);
      for (int64_t k = 0; k < group_size; k += WORD_INPUTS)
        for (int plane = 0; plane < PLANES; ++plane)
          reorder<typename Format::Unpack>(planes.data() + plane * group_size + k,
                                           out + PLANES * k + plane * WORD_INPUTS);
      rows.scale[index] = group.scale;
      rows.sum[index] = group.scale * group.sum;
      // The cast discards bits only if the row is not finite, where any value will do.
      rows.initial_sum[index] = static_cast<int32_t>(-int64_t{code_offset} * group.sum);
    }
  });
  return rows;
}

// One product of a call: the only one, or one of several, each with its rows, a matrix of the stack and its result.
struct ProductCall {
  const Call& call;
  int64_t index = -1;   // of rows and result; -1: there is no stack
  int64_t matrix = -1;  // of the stack; -1: there is no stack

  Buffer rows() const { return index < 0 ? call.array(0) : call.array(0).slice(index); }
  Buffer weight(int64_t i = 1) const { return matrix < 0 ? call.array(i) : call.array(i).slice(matrix); }
  int64_t inputs() const {
    Buffer w = weight();
    return w.dim(1) * (w.type() == dtype::U32 ? 8 : w.dim(3));  // a word holds eight codes
  }
  Output output() const {
    Buffer y = index < 0 ? call.result() : call.result().slice(index);
    int32_t activation = call.attribute<int32_t>("activation");
    const float* bias = call.array(call.num_arrays() - 2).data_or_null<float>();
    int64_t num_blocks = weight().dim(0);
    return {y.data<void>(), y.is_float32(), bias, y.last_dim(), activation ? num_blocks / 2 : num_blocks, activation};
  }
};

// Calls run(product) for each product of a call. The arrays of a call are rows, weights, a bias (or an empty array)
// and, last, the indices of the matrices in the stack (empty if there is no stack).
template <typename Run>
const char* for_each_product(const Call& call, const Run& run) {
  Buffer indices = call.array(call.num_arrays() - 1);
  const int32_t* matrix = indices.data_or_null<int32_t>();
  if (!matrix) run(ProductCall{call});
  for (int64_t i = 0; i < indices.size(); ++i) {
    if (matrix[i] < 0 || matrix[i] >= call.array(1).dim(0)) return "the stack has no such matrix";
    run(ProductCall{call, i, matrix[i]});
  }
  return nullptr;
}

// Runs the products of a format without groups. `make_format(product)` gives the format with a product's weight.
template <typename Format, typename MakeFormat>
const char* run_products(const Call& call, const MakeFormat& make_format) {
  Pool pool = call.pool();
  return for_each_product(call, [&](const ProductCall& p) {
    int64_t T = rows_used(p.rows()), K = p.inputs();
    Output out = p.output();
    product(pool, make_format(p), PaddedRows<Format>(pool, p.rows(), T, K).rows, T, K, out);
    out.fill_zero_rows(T, num_rows(p.rows()));
  });
}

// Quantisation parameters of a weight's groups.
template <typename Scale>
struct GroupParams {
  Scale scale;
  Scale minimum;
  const uint8_t* zero_point = nullptr;
};

// Runs the products of a group-quantised format. `group_params(product, group_size)` gives the parameters of a product.
template <typename Format, typename MakeParams>
const char* run_grouped_products(const Call& call, const MakeParams& group_params) {
  Pool pool = call.pool();
  return for_each_product(call, [&](const ProductCall& p) {
    Buffer x = p.rows();
    int64_t output_words = p.weight().size() / p.weight().dim(0) / LANES;
    int64_t K = output_words * 8 * sizeof(typename Format::Word) / Format::BITS;
    int64_t group_size = K / p.weight(2).dim(1);
    int64_t T = rows_used(x);
    Output out = p.output();
    auto params = group_params(p, group_size);
    bool has_offsets = params.zero_point || params.minimum.values;
    auto* w = p.weight().data<typename Format::Word>();
    if constexpr (quantises_rows<Format>) {
      int code_offset = Format::OFFSET + (has_offsets ? 0 : Format::MIDPOINT);
      auto rows = quantise_rows<Format>(pool, x, T, K, group_size, code_offset);
      product(pool, Format{w, params.scale, params.minimum, rows, group_size, params.zero_point}, rows.values.data(), T,
              K, out);
    } else {
      PaddedRows<Format> padded(pool, x, T, K);
      bool needs_sums = has_offsets || Format::DEFAULT_OFFSET != 0;
      std::vector<float> sums = group_sums(pool, padded.rows, needs_sums ? T : 0, K, group_size);
      Format f{w, params.scale, params.minimum, needs_sums ? sums.data() : nullptr, group_size, params.zero_point};
      product(pool, f, padded.rows, T, K, out);
    }
    out.fill_zero_rows(T, num_rows(x));
  });
}

}  // namespace quire
