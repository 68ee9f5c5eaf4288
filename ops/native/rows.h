// What the entries to the weight products share: rows as a format takes them, and placing the results.
#pragma once

#include <vector>

#include "ffi.h"
#include "group_integers.h"
#include "linear.h"
#include "norm.h"

namespace quire {

inline Row row_of(Buffer x, int64_t row) { return {x.data<char>() + row * x.last() * (x.wide() ? 4 : 2), x.wide()}; }

// The rows in a format's type, their ends filled up with zeros.
template <typename Format>
struct Padded {
  using X = typename Format::X;
  std::vector<X> own;
  const X* rows;

  Padded(Pool& pool, Buffer x, int64_t T, int64_t K) {
    int64_t from = x.last();
    rows = x.data<X>();
    if (from == K && x.wide() == (sizeof(X) == 4) && !(x.wide() && Format::NARROW)) return;
    own.resize(T * K);
    rows = own.data();
    each_row(pool, T, K, [&](int64_t row) {
      X* out = own.data() + row * K;
      if (x.wide())
        copy(x.data<float>() + row * from, from, out);
      else
        copy(x.data<uint16_t>() + row * from, from, out);
    });
  }

  template <typename From>
  static void copy(const From* in, int64_t count, X* out) {
    for (int64_t k = 0; k < count; ++k)
      if constexpr (std::is_same_v<From, X> && !(sizeof(X) == 4 && Format::NARROW))
        out[k] = in[k];
      else if constexpr (sizeof(X) == 2)
        out[k] = narrow(in[k]);
      else if constexpr (sizeof(From) == 2)
        out[k] = widen(in[k]);
      else
        out[k] = widen(narrow(in[k]));
  }
};

// The sum of each row over each group of inputs.
inline std::vector<float> group_sums(Pool& pool, const Half* rows, int64_t T, int64_t K, int64_t group) {
  int64_t groups = K / group;
  std::vector<float> sums(T * groups);
  each_row(pool, T, K, [&](int64_t row) {
    for (int64_t g = 0; g < groups; ++g) {
      f32x16 sum{};
      sixteens(group, [&](int64_t k, auto lanes) { sum += get(Row{rows + row * K + g * group, sizeof(Half) == 4}, k, lanes); });
      float each[LANES];
      store(each, sum);
      for (float part : each) sums[row * groups + g] += part;
    }
  });
  return sums;
}

// Bytes of WORD inputs in the order of a format's codes.
template <typename Codes>
inline void reorder(const uint8_t* from, int8_t* to) {
#if defined(__SSSE3__)
  if constexpr (Codes::WORD == 8) {
    __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(Codes::ORDER));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                     _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), order));
    return;
  } else if constexpr (Codes::WORD == 16) {
    __m128i order = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Codes::ORDER));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), order));
    return;
  }
#endif
  for (int64_t i = 0; i < Codes::WORD; ++i) to[i] = static_cast<int8_t>(from[Codes::ORDER[i]]);
}

// Rows as integers in groups; every code stands for so much `more` than its own number.
template <typename Format, int PLANES>
GroupIntegers<PLANES> group_integers(Pool& pool, Buffer x, int64_t T, int64_t K, int64_t group, int more) {
  constexpr int64_t WORD = Format::WORD;
  int64_t from = x.last(), groups = K / group;
  auto shared = static_cast<size_t>(T * groups);
  std::vector<float> zeros(shared);
  // The largest that two bytes hold; smaller where a group's sums would not fit into 32 bits.
  const float most = std::min<int64_t>(127 * 257, INT32_MAX / (Format::LARGEST * group));
  GroupIntegers<PLANES> made{std::vector<typename Format::X>(T * K), zeros, zeros, std::vector<int32_t>(shared)};
  each_row(pool, T, K, [&](int64_t row) {
    std::vector<uint8_t> planes(PLANES * group);
    for (int64_t g = 0; g < groups && g * group < from; ++g) {
      int64_t at = row * groups + g, start = g * group, stop = std::min(from, start + group);
      if (stop < start + group) std::fill(planes.begin(), planes.end(), 0);
      Row::Integers integers;
      if constexpr (PLANES == 1)
        integers = row_of(x, row).bytes(start, stop, planes.data(), 0);
      else
        integers = row_of(x, row).two_bytes(start, stop, most, planes.data(), planes.data() + group);
      auto* out = reinterpret_cast<int8_t*>(made.rows.data() + row * K + start);
      for (int64_t k = 0; k < group; k += WORD)
        for (int plane = 0; plane < PLANES; ++plane)
          reorder<typename Format::Order>(planes.data() + plane * group + k, out + PLANES * k + plane * WORD);
      made.scale[at] = integers.scale, made.sum[at] = integers.scale * integers.sum;
      made.start[at] = static_cast<int32_t>(-int64_t{more} * integers.sum);  // any number if the row is not finite
    }
  });
  return made;
}

// One product of a call: the only one, or one of several, with rows, a matrix of the stack and a result of its own.
struct Product {
  const Call& call;
  int64_t turn = -1, matrix = -1;  // -1: there is no stack

  Buffer rows() const { return turn < 0 ? call.array(0) : call.array(0).part(turn); }
  Buffer weight(int64_t i = 1) const { return matrix < 0 ? call.array(i) : call.array(i).part(matrix); }
  int64_t inputs() const {
    Buffer w = weight();
    return w.dim(1) * (w.type() == dtype::U32 ? 8 : w.dim(3));  // a word holds eight
  }
  Out out() const {
    Buffer y = turn < 0 ? call.result() : call.result().part(turn);
    int32_t activation = call.attribute<int32_t>("activation");
    const float* bias = call.array(call.arrays() - 2).given<float>();
    int64_t blocks = weight().dim(0);
    return {y.data<void>(), y.wide(), bias, y.last(), activation ? blocks / 2 : blocks, activation};
  }
};

// Runs each product of a call. Its arrays are rows, weights, a bias (or an empty array) and, last, the numbers of the
// matrices of the stack (empty if there is no stack).
template <typename Run>
const char* each_product(const Call& call, const Run& run) {
  Buffer names = call.array(call.arrays() - 1);
  const int32_t* matrix = names.given<int32_t>();
  if (!matrix) run(Product{call});
  for (int64_t i = 0; i < names.size(); ++i) {
    if (matrix[i] < 0 || matrix[i] >= call.array(1).dim(0)) return "the stack has no such matrix";
    run(Product{call, i, matrix[i]});
  }
  return nullptr;
}

// Products of a format that takes rows as they are: `weights` gives a product's weights.
template <typename Format, typename Weights>
const char* products(const Call& call, const Weights& weights) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    int64_t T = rows_used(p.rows()), K = p.inputs();
    Out out = p.out();
    product(pool, weights(p), Padded<Format>(pool, p.rows(), T, K).rows, T, K, out);
    out.fill(T, rows_in(p.rows()));
  });
}

// What the groups of a product's weight share.
template <typename Scale>
struct Shared {
  Scale scale, least;
  const uint8_t* zero = nullptr;
};

// Products of a format whose weights are codes in groups; `shared` gives what those of a product share.
template <typename Format, typename Of>
const char* grouped_products(const Call& call, const Of& shared) {
  Pool pool = call.pool();
  return each_product(call, [&](const Product& p) {
    Buffer x = p.rows();
    int64_t words = p.weight().size() / p.weight().dim(0) / LANES;  // of an output
    int64_t K = words * 8 * sizeof(typename Format::Word) / Format::BITS, group = K / p.weight(2).dim(1);
    int64_t T = rows_used(x);
    Out out = p.out();
    auto own = shared(p, group);
    bool taken_off = own.zero || own.least.each;
    auto* w = p.weight().data<typename Format::Word>();
    if constexpr (takes_integers<Format>) {
      int more = Format::OFFSET + (taken_off ? 0 : Format::MIDDLE);
      auto integers = group_integers<Format, Format::PLANES>(pool, x, T, K, group, more);
      product(pool, Format{w, own.scale, own.least, integers, group, own.zero}, integers.rows.data(), T, K, out);
    } else {
      Padded<Format> padded(pool, x, T, K);
      bool summed = taken_off || Format::REST != 0;
      std::vector<float> sums = group_sums(pool, padded.rows, summed ? T : 0, K, group);
      Format f{w, own.scale, own.least, summed ? sums.data() : nullptr, group, own.zero};
      product(pool, f, padded.rows, T, K, out);
    }
    out.fill(T, rows_in(x));
  });
}

}  // namespace quire
