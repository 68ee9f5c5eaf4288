// Weight products: rows and blocks of a weight spread over threads, and results made from their sums.
#pragma once

#include <vector>

#include "formats.h"
#include "row.h"
#include "threads.h"

namespace quire {

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2 };

inline f32x16 activate(f32x16 x, int activation) {
  if (activation == SILU) return x / (1.0f + exp(-x));
  return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// Where results go: [T, O] in either type, with a bias or none; with an activation, gate and up in, one of them out.
struct Out {
  void* y;
  bool wide;  // float32
  const float* bias;
  int64_t O;       // outputs that are written
  int64_t blocks;  // of sixteen; under an activation those of the gate, and as many of the up part follow them
  int activation;

  void write(int64_t row, int64_t block, f32x16 value) const {
    Place{y, wide}.put(row * O + block * LANES, std::min<int64_t>(LANES, O - block * LANES), value);
  }

  // The results of rows of zeros: the first, and copies of it.
  void fill(int64_t row, int64_t stop) const {
    if (row >= stop) return;
    int64_t bytes = O * (wide ? 4 : 2);
    char* first = static_cast<char*>(y) + row * bytes;
    if (!bias) {
      std::memset(first, 0, (stop - row) * bytes);
      return;
    }
    for (int64_t block = 0; block < blocks; ++block) write(row, block, load(bias + block * LANES));
    for (int64_t other = 1; other < stop - row; ++other) std::memcpy(first + other * bytes, first, bytes);
  }
};

template <int R, int N, typename Format>
void rows_of(const Format& f, const typename Format::X* x, int64_t row, int64_t K, const Panel& panel, int used,
             const Out& out) {
  constexpr int EACH = R > ROWS ? BLOCKS / 2 : N;  // blocks at once: more rows leave registers for fewer
  f32x16 sums[R][N];
  for (int first = 0; first < N; first += EACH) {
    Panel some{};
    for (int n = 0; n < EACH; ++n) some.block[n] = panel.block[first + n], some.then[n] = panel.then[first + n];
    if (panel.wide) some.wide = panel.wide + first * K * LANES;
    F parts[R][EACH][H];
    if (Format::WIDENS && panel.wide)
      f.template run<R, EACH, Format::WIDENS>(x, row, K, some, parts);
    else
      f.template run<R, EACH, false>(x, row, K, some, parts);
    for (int n = 0; n < EACH; ++n)
      for (int r = 0; r < R; ++r) {
        UNROLL for (int h = 0; h < H; ++h) sums[r][first + n].part[h] = parts[r][n][h];
        sums[r][first + n] = f.finish(sums[r][first + n], panel.block[first + n], row + r);
      }
  }
  asm volatile("" ::"r"(sums) : "memory");  // so that no scale and bias become one rounding, for some R and not for others
  if (out.bias)
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r) sums[r][n] += load(out.bias + panel.block[n] * LANES);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < used; ++n)
      out.write(row + r, panel.block[n],
                out.activation ? activate(sums[r][n], out.activation) * sums[r][N / 2 + n] : sums[r][n]);
}

template <typename Format, int R = Format::MOST>
void any_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t rows, int64_t K, const Panel& panel,
              int used, const Out& out) {
  if constexpr (R <= ROWS)
    if (rows >= R && (R <= Format::FULL || panel.wide)) return rows_of<R, BLOCKS>(f, x, row, K, panel, used, out);
  if constexpr (R > Format::FULL)
    if (rows >= R) {
      // Two blocks of outputs, or one of the gate and its part of up; one call, or the compiler makes a copy for each. Floats
      // that were made of weights lie as the panel's blocks do: only panels of two get here with some.
      const int step = out.activation ? 1 : 2, other = out.activation ? BLOCKS / 2 : 1;
      for (int n = 0; n < used; n += step) {
        Panel pair{{panel.block[n], panel.block[n + other]}, {panel.then[n], panel.then[n + other]}, panel.wide};
        rows_of<R, 2>(f, x, row, K, pair, std::min(step, used - n), out);
      }
      return;
    }
  if constexpr (R > 1) any_rows<Format, R - 1>(f, x, row, rows, K, panel, used, out);
}

// How many rows a thread takes at a time: as many as its second-level cache holds beside the weights.
inline int64_t rows_a_tile(int64_t row_bytes) { return std::max<int64_t>(4, (256 << 10) / row_bytes / MANY) * MANY; }

// The weights of a product that is no longer than the reading of them.
template <typename Format>
Span weights_of(const Format& f, int64_t T, int64_t K, const Out& out) {
  if (T > 2 * MANY) return {};
  int64_t blocks = out.blocks * (out.activation ? 2 : 1);
  return {reinterpret_cast<const char*>(f.w), blocks * LANES * K * Format::BITS / 8};
}

#if defined(QUIRE_AMX)

// One step of the sums over 64 bytes of inputs, for M tiles of rows and two blocks.
template <int M, bool BYTES>
void tile_step(const uint8_t* x, int64_t stride, const uint8_t* w0, const uint8_t* w1) {
  amx::load<4>(x, stride);
  if constexpr (M == 2) amx::load<5>(x + 16 * stride, stride);
  amx::load<6>(w0, 64);
  amx::load<7>(w1, 64);
  if constexpr (BYTES) {
    amx::dot_int8<0, 4, 6>();
    amx::dot_int8<1, 4, 7>();
    if constexpr (M == 2) {
      amx::dot_int8<2, 5, 6>();
      amx::dot_int8<3, 5, 7>();
    }
  } else {
    amx::dot_bf16<0, 4, 6>();
    amx::dot_bf16<1, 4, 7>();
    if constexpr (M == 2) {
      amx::dot_bf16<2, 5, 6>();
      amx::dot_bf16<3, 5, 7>();
    }
  }
}

// The sums of up to 32 rows and two blocks, as floats; the tiles are configured for so many rows.
template <int M, typename Format>
void tile_sums(const Format& f, const typename Format::X* x, int64_t row, int64_t K, const int64_t* block,
               float (*sums)[2][LANES]) {
  constexpr bool BYTES = sizeof(*f.w) == 1;
  int64_t stride = K * sizeof(*x), row_bytes = K * LANES * sizeof(*f.w);
  auto* from = reinterpret_cast<const uint8_t*>(x + row * K);
  auto* w = reinterpret_cast<const uint8_t*>(f.w);
  amx::zero<0>();
  amx::zero<1>();
  if constexpr (M == 2) {
    amx::zero<2>();
    amx::zero<3>();
  }
  for (int64_t at = 0; at < stride; at += 64)
    tile_step<M, BYTES>(from + at, stride, w + block[0] * row_bytes + at * LANES, w + block[1] * row_bytes + at * LANES);
  amx::store<0>(sums[0][0], sizeof(*sums));
  amx::store<1>(sums[0][1], sizeof(*sums));
  if constexpr (M == 2) {
    amx::store<2>(sums[16][0], sizeof(*sums));
    amx::store<3>(sums[16][1], sizeof(*sums));
  }
}

template <typename Format>
void tile_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t rows, int64_t K, const int64_t* block,
               int used, const Out& out) {
  alignas(64) float sums[32][2][LANES];
  amx::start(amx::config(std::min<int64_t>(rows, 16), std::max<int64_t>(rows - 16, 1)));
  if (rows > 16)
    tile_sums<2>(f, x, row, K, block, sums);
  else
    tile_sums<1>(f, x, row, K, block, sums);
  for (int64_t r = 0; r < rows; ++r) {
    f32x16 value[2];
    for (int n = 0; n < 2; ++n) {
      value[n] = f.finish(load(sums[r][n]), block[n], row + r);
      if (out.bias) value[n] += load(out.bias + block[n] * LANES);
    }
    for (int n = 0; n < used; ++n)
      out.write(row + r, block[n], out.activation ? activate(value[n], out.activation) * value[1] : value[n]);
  }
}

template <typename Pool, typename Format>
void tile_product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K,
                  const Out& out) {
  const int width = out.activation ? 1 : 2;
  int64_t panels = (out.blocks + width - 1) / width;
  int64_t tile = std::max<int64_t>(1, (256 << 10) / (K * sizeof(*x)) / 32) * 32, tiles = (T + tile - 1) / tile;
  parallel(pool, panels * tiles, [&](int64_t chunk) {
    int64_t first = chunk / tiles * width, start = chunk % tiles * tile, stop = std::min(T, start + tile);
    int used = static_cast<int>(std::min<int64_t>(width, out.blocks - first));
    int64_t block[2] = {first, out.activation ? out.blocks + first : first + used - 1};
    for (int64_t row = start; row < stop; row += 32)
      tile_rows(f, x, row, std::min<int64_t>(32, stop - row), K, block, used, out);
    amx::stop();
  }, weights_of(f, T, K, out));
}

#endif

// The rows as `run` wants them: those that are taken together interleaved.
template <typename Format, typename Pool>
std::vector<typename Format::X> interleave(Pool& pool, const typename Format::X* x, int64_t T, int64_t K,
                                           int64_t most) {
  constexpr int64_t GROUP = Format::GROUP;
  std::vector<typename Format::X> mixed(T * K);
  int64_t blocks = (T + most - 1) / most, together = std::max<int64_t>(1, (64 << 10) / (most * K));
  parallel(pool, (blocks + together - 1) / together, [&](int64_t chunk) {
    for (int64_t row = chunk * together * most; row < std::min(T, (chunk + 1) * together * most); row += most) {
      int64_t rows = std::min(most, T - row);
      for (int64_t r = 0; r < rows; ++r) {
        const typename Format::X* from = x + (row + r) * K;
        typename Format::X* to = mixed.data() + row * K + r * GROUP;
        for (int64_t k = 0; k < K; k += GROUP) std::memcpy(to + k * rows, from + k, GROUP * sizeof(*x));
      }
    }
  });
  return mixed;
}

// Where a panel's weights lie as floats, until this thread asks again.
template <typename Format>
const float* widened(const Format& f, const Panel& panel, int64_t K) {
  static thread_local std::vector<float> room;
  room.resize(BLOCKS * K * LANES);
  for (int n = 0; n < BLOCKS; ++n) widen_block(f, panel.block[n], K, room.data() + n * K * LANES);
  return room.data();
}

// For more rows than this it pays to make floats of the weights first.
constexpr int64_t OFTEN = FEW_REGISTERS ? 2 * ROWS : 2 * MANY;

template <typename Pool, typename Format>
void vector_product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K, const Out& out) {
  const int width = out.activation ? BLOCKS / 2 : BLOCKS;
  const int64_t most = FEW_REGISTERS || T <= 2 * MANY ? Format::MOST : ROWS;
  std::vector<typename Format::X> mixed;
  if (T > 1) {
    mixed = interleave<Format>(pool, x, T, K, most);
    x = mixed.data();
  }
  int64_t panels = (out.blocks + width - 1) / width, tile = rows_a_tile(K * sizeof(*x));
  int64_t tiles = (T + tile - 1) / tile;
  parallel(pool, panels * tiles, [&](int64_t chunk, int64_t upcoming) {
    int64_t first = chunk / tiles * width, start = chunk % tiles * tile, stop = std::min(T, start + tile);
    int used = static_cast<int>(std::min<int64_t>(width, out.blocks - first));
    Panel panel{};  // one that runs over the end does its last block more than once
    for (int n = 0; n < width; ++n) panel.block[n] = first + std::min(n, used - 1);
    if (out.activation)
      for (int n = 0; n < width; ++n) panel.block[width + n] = out.blocks + panel.block[n];
    if constexpr (Format::WIDENS)
      if (stop - start > OFTEN) panel.wide = widened(f, panel, K);
    // While rows meet these weights those of the next chunk come from memory, its blocks in turn over the rows: where few
    // rows meet them, for a thread's chunks are too short for the processor to foresee; where rows take two goes, for
    // memory would rest during the second.
    bool beside = T <= ROWS || FEW_REGISTERS || (T > most && T <= 2 * most);
    int64_t further = beside && upcoming < panels * tiles ? (upcoming / tiles - chunk / tiles) * width : 0;
    for (int64_t row = start; row < stop; row += most) {
      for (int n = 0; n < BLOCKS; ++n) {
        int64_t turn = start + (stop - start) * n / BLOCKS;
        panel.then[n] = row <= turn && turn < row + most ? further : 0;
      }
      any_rows(f, x, row, std::min(most, stop - row), K, panel, used, out);
    }
  }, weights_of(f, T, K, out));
}

template <typename Pool, typename Format>
void product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K, const Out& out) {
#if defined(QUIRE_AMX)
  if constexpr (Format::TILES)
    tile_product(pool, f, x, T, K, out);
  else
#endif
    vector_product(pool, f, x, T, K, out);
}

}  // namespace quire
