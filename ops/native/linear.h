// Products y = x W of rows with a weight: partition into panels and chunks of rows that threads share, register tiles,
// AMX tiles, and the epilogue (bias, activation, conversion). formats.h has the inner loops.
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

// The output [T, O] of a product, and its epilogue. With an activation, the weight has gate and up blocks, and the
// output is activate(gate) * up.
struct Output {
  void* y;
  bool is_float32;    // else bfloat16
  const float* bias;  // or null
  int64_t O;
  int64_t num_blocks;  // of sixteen outputs; with an activation only of the gate, which as many up blocks follow
  int activation;

  void write(int64_t row, int64_t block, f32x16 values) const {
    OutputRow{y, is_float32}.store_at(row * O + block * LANES, std::min<int64_t>(LANES, O - block * LANES), values);
  }

  // Writes the results of all-zero rows: zeros, or copies of the bias.
  void fill_zero_rows(int64_t row, int64_t stop) const {
    if (row >= stop) return;
    int64_t bytes = O * (is_float32 ? 4 : 2);
    char* first = static_cast<char*>(y) + row * bytes;
    if (!bias) {
      std::memset(first, 0, (stop - row) * bytes);
      return;
    }
    for (int64_t block = 0; block < num_blocks; ++block) write(row, block, load(bias + block * LANES));
    for (int64_t i = 1; i < stop - row; ++i) std::memcpy(first + i * bytes, first, bytes);
  }
};

// Computes R rows of N blocks, of which the first `num_outputs` are written.
template <int R, int N, typename Format>
void multiply_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t K, const Panel& panel,
                   int num_outputs, const Output& out) {
  constexpr int TILE_N = R > TILE_ROWS ? TILE_BLOCKS / 2 : N;  // blocks of a register tile
  f32x16 sums[R][N];
  for (int first = 0; first < N; first += TILE_N) {
    Panel tile_panel{};
    for (int n = 0; n < TILE_N; ++n) {
      tile_panel.block[n] = panel.block[first + n];
      tile_panel.prefetch_distance[n] = panel.prefetch_distance[first + n];
    }
    if (panel.dequantised) tile_panel.dequantised = panel.dequantised + first * K * LANES;
    F tile[R][TILE_N][H];
    constexpr bool MAY_BE_DEQUANTISED = Format::DEQUANTISES && (HAS_FEW_REGISTERS || R <= TILE_ROWS);
    if (MAY_BE_DEQUANTISED && panel.dequantised)
      f.template multiply_tile<R, TILE_N, MAY_BE_DEQUANTISED>(x, row, K, tile_panel, tile);
    else
      f.template multiply_tile<R, TILE_N, false>(x, row, K, tile_panel, tile);
    for (int n = 0; n < TILE_N; ++n)
      for (int r = 0; r < R; ++r) {
        UNROLL for (int h = 0; h < H; ++h) sums[r][first + n].vector[h] = tile[r][n][h];
        sums[r][first + n] = f.finish(sums[r][first + n], panel.block[first + n], row + r);
      }
  }
  // Prevents fusing scale and bias into an FMA, which the compiler would do for some R only.
  asm volatile("" ::"r"(sums) : "memory");
  if (out.bias)
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r) sums[r][n] += load(out.bias + panel.block[n] * LANES);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < num_outputs; ++n)
      out.write(row + r, panel.block[n],
                out.activation ? activate(sums[r][n], out.activation) * sums[r][N / 2 + n] : sums[r][n]);
}

// Calls multiply_rows for `num_rows` rows, at most R. More rows than FULL_ROWS are multiplied with two blocks at a
// time.
template <typename Format, int R = Format::MAX_ROWS>
void dispatch_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t num_rows, int64_t K,
                   const Panel& panel, int num_outputs, const Output& out) {
  if constexpr (R <= TILE_ROWS)
    if (num_rows >= R && (R <= Format::FULL_ROWS || panel.dequantised))
      return multiply_rows<R, TILE_BLOCKS>(f, x, row, K, panel, num_outputs, out);
  if constexpr (R > Format::FULL_ROWS)
    if (num_rows >= R) {
      // Two output blocks, or a gate block and its up block. One call serves both cases, since the compiler would
      // inline a copy for each. `dequantised` is null here unless the panel has only two blocks, so its order is right.
      const int step = out.activation ? 1 : 2;
      const int second = out.activation ? TILE_BLOCKS / 2 : 1;
      for (int n = 0; n < num_outputs; n += step) {
        Panel pair{{panel.block[n], panel.block[n + second]},
                   {panel.prefetch_distance[n], panel.prefetch_distance[n + second]},
                   panel.dequantised};
        multiply_rows<R, 2>(f, x, row, K, pair, std::min(step, num_outputs - n), out);
      }
      return;
    }
  if constexpr (R > 1) dispatch_rows<Format, R - 1>(f, x, row, num_rows, K, panel, num_outputs, out);
}

// Rows of a chunk of work: as many as fit into 256 KiB (but at least four tiles), which leaves room for weights in the
// second-level cache.
inline int64_t rows_per_chunk(int64_t row_bytes) {
  return std::max<int64_t>(4, (256 << 10) / row_bytes / MAX_TILE_ROWS) * MAX_TILE_ROWS;
}

// The weight's memory if the product is bound by reading it, for prefetching between products; else empty.
template <typename Format>
Span prefetchable_weight(const Format& f, int64_t T, int64_t K, const Output& out) {
  if (T > 2 * MAX_TILE_ROWS) return {};
  int64_t num_blocks = out.num_blocks * (out.activation ? 2 : 1);
  return {reinterpret_cast<const char*>(f.w), num_blocks * LANES * K * Format::BITS / 8};
}

#if defined(QUIRE_AMX)

// Adds the products of 64 bytes of inputs, for M tiles of sixteen rows and two blocks.
template <int M, bool IS_INT8>
void amx_step(const uint8_t* x, int64_t stride, const uint8_t* w0, const uint8_t* w1) {
  amx::load<4>(x, stride);
  if constexpr (M == 2) amx::load<5>(x + 16 * stride, stride);
  amx::load<6>(w0, 64);
  amx::load<7>(w1, 64);
  if constexpr (IS_INT8) {
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

// Sums of up to 16 * M rows and two blocks, as floats or the bits of int32. The tiles must be configured.
template <int M, typename Format>
void amx_sums(const Format& f, const typename Format::X* x, int64_t row, int64_t K, const int64_t* block,
              float (*sums)[2][LANES]) {
  constexpr bool IS_INT8 = sizeof(*f.w) == 1;
  int64_t row_bytes = K * sizeof(*x);
  int64_t block_bytes = K * LANES * sizeof(*f.w);
  auto* x_bytes = reinterpret_cast<const uint8_t*>(x + row * K);
  auto* w = reinterpret_cast<const uint8_t*>(f.w);
  amx::zero<0>();
  amx::zero<1>();
  if constexpr (M == 2) {
    amx::zero<2>();
    amx::zero<3>();
  }
  for (int64_t offset = 0; offset < row_bytes; offset += 64)
    amx_step<M, IS_INT8>(x_bytes + offset, row_bytes, w + block[0] * block_bytes + offset * LANES,
                         w + block[1] * block_bytes + offset * LANES);
  amx::store<0>(sums[0][0], sizeof(*sums));
  amx::store<1>(sums[0][1], sizeof(*sums));
  if constexpr (M == 2) {
    amx::store<2>(sums[16][0], sizeof(*sums));
    amx::store<3>(sums[16][1], sizeof(*sums));
  }
}

// Computes up to 32 rows of two blocks: two output blocks, or a gate block and its up block.
template <typename Format>
void amx_multiply_rows(const Format& f, const typename Format::X* x, int64_t row, int64_t num_rows, int64_t K,
                       const int64_t* block, int num_outputs, const Output& out) {
  alignas(64) float sums[32][2][LANES];
  amx::start(amx::config(std::min<int64_t>(num_rows, 16), std::max<int64_t>(num_rows - 16, 1)));
  if (num_rows > 16)
    amx_sums<2>(f, x, row, K, block, sums);
  else
    amx_sums<1>(f, x, row, K, block, sums);
  for (int64_t r = 0; r < num_rows; ++r) {
    f32x16 values[2];
    for (int n = 0; n < 2; ++n) {
      values[n] = f.finish(load(sums[r][n]), block[n], row + r);
      if (out.bias) values[n] += load(out.bias + block[n] * LANES);
    }
    for (int n = 0; n < num_outputs; ++n)
      out.write(row + r, block[n], out.activation ? activate(values[n], out.activation) * values[1] : values[n]);
  }
}

template <typename Pool, typename Format>
void amx_product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K, const Output& out) {
  const int width = out.activation ? 1 : 2;  // output blocks of a panel
  int64_t num_panels = (out.num_blocks + width - 1) / width;
  int64_t chunk_rows = std::max<int64_t>(1, (256 << 10) / (K * sizeof(*x)) / 32) * 32;
  int64_t row_chunks = (T + chunk_rows - 1) / chunk_rows;
  parallel(pool, num_panels * row_chunks, [&](int64_t chunk) {
    int64_t first_block = chunk / row_chunks * width;
    int64_t start = chunk % row_chunks * chunk_rows;
    int64_t stop = std::min(T, start + chunk_rows);
    int num_outputs = static_cast<int>(std::min<int64_t>(width, out.num_blocks - first_block));
    int64_t block[2] = {first_block, out.activation ? out.num_blocks + first_block : first_block + num_outputs - 1};
    for (int64_t row = start; row < stop; row += 32)
      amx_multiply_rows(f, x, row, std::min<int64_t>(32, stop - row), K, block, num_outputs, out);
    amx::stop();
  }, prefetchable_weight(f, T, K, out));
}

#endif

// Interleaves the rows of each register tile of up to `tile_rows` rows, in the order that `multiply_tile` reads.
template <typename Format, typename Pool>
std::vector<typename Format::X> interleave(Pool& pool, const typename Format::X* x, int64_t T, int64_t K,
                                           int64_t tile_rows) {
  constexpr int64_t GROUP = Format::ROW_GROUP;
  std::vector<typename Format::X> interleaved(T * K);
  int64_t num_tiles = (T + tile_rows - 1) / tile_rows;
  int64_t chunk_tiles = std::max<int64_t>(1, (64 << 10) / (tile_rows * K));
  parallel(pool, (num_tiles + chunk_tiles - 1) / chunk_tiles, [&](int64_t chunk) {
    int64_t row = chunk * chunk_tiles * tile_rows;
    for (; row < std::min(T, (chunk + 1) * chunk_tiles * tile_rows); row += tile_rows) {
      int64_t num_rows = std::min(tile_rows, T - row);
      for (int64_t r = 0; r < num_rows; ++r) {
        const typename Format::X* source = x + (row + r) * K;
        typename Format::X* target = interleaved.data() + row * K + r * GROUP;
        for (int64_t k = 0; k < K; k += GROUP) std::memcpy(target + k * num_rows, source + k, GROUP * sizeof(*x));
      }
    }
  });
  return interleaved;
}

// Dequantises the weights of a panel into a buffer of this thread, which the next call overwrites.
template <typename Format>
const float* dequantise_panel(const Format& f, const Panel& panel, int64_t K) {
  static thread_local std::vector<float> buffer;
  buffer.resize(TILE_BLOCKS * K * LANES);
  for (int n = 0; n < TILE_BLOCKS; ++n) dequantise_block(f, panel.block[n], K, buffer.data() + n * K * LANES);
  return buffer.data();
}

// With more rows than this it is faster to dequantise a panel first.
constexpr int64_t DEQUANTISE_ABOVE_ROWS = HAS_FEW_REGISTERS ? 2 * TILE_ROWS : 2 * MAX_TILE_ROWS;

template <typename Pool, typename Format>
void vector_product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K,
                    const Output& out) {
  const int width = out.activation ? TILE_BLOCKS / 2 : TILE_BLOCKS;  // output blocks of a panel
  const int64_t tile_rows = HAS_FEW_REGISTERS || T <= 2 * MAX_TILE_ROWS ? Format::MAX_ROWS : TILE_ROWS;
  std::vector<typename Format::X> interleaved;
  if (T > 1) {
    interleaved = interleave<Format>(pool, x, T, K, tile_rows);
    x = interleaved.data();
  }
  int64_t num_panels = (out.num_blocks + width - 1) / width;
  int64_t chunk_rows = rows_per_chunk(K * sizeof(*x));
  int64_t row_chunks = (T + chunk_rows - 1) / chunk_rows;
  parallel(pool, num_panels * row_chunks, [&](int64_t chunk, int64_t next_chunk) {
    int64_t first_block = chunk / row_chunks * width;
    int64_t start = chunk % row_chunks * chunk_rows;
    int64_t stop = std::min(T, start + chunk_rows);
    int num_outputs = static_cast<int>(std::min<int64_t>(width, out.num_blocks - first_block));
    Panel panel{};  // the last panel repeats its last block
    for (int n = 0; n < width; ++n) panel.block[n] = first_block + std::min(n, num_outputs - 1);
    if (out.activation)
      for (int n = 0; n < width; ++n) panel.block[width + n] = out.num_blocks + panel.block[n];
    if constexpr (Format::DEQUANTISES)
      if (stop - start > DEQUANTISE_ABOVE_ROWS) panel.dequantised = dequantise_panel(f, panel, K);
    // The weights of the thread's next chunk are prefetched, its blocks in turn over the rows, in two cases: with few
    // rows, where chunks are too short for the hardware prefetcher, and with two tiles of rows, where memory would idle
    // during the second.
    bool prefetches = T <= TILE_ROWS || HAS_FEW_REGISTERS || (T > tile_rows && T <= 2 * tile_rows);
    int64_t distance = prefetches && next_chunk < num_panels * row_chunks
                           ? (next_chunk / row_chunks - chunk / row_chunks) * width
                           : 0;
    for (int64_t row = start; row < stop; row += tile_rows) {
      for (int n = 0; n < TILE_BLOCKS; ++n) {
        int64_t prefetch_row = start + (stop - start) * n / TILE_BLOCKS;
        panel.prefetch_distance[n] = row <= prefetch_row && prefetch_row < row + tile_rows ? distance : 0;
      }
      dispatch_rows(f, x, row, std::min(tile_rows, stop - row), K, panel, num_outputs, out);
    }
  }, prefetchable_weight(f, T, K, out));
}

// Computes `out` from T rows of K values: int8 or bfloat16 on AMX if possible, else by vectors.
template <typename Pool, typename Format>
void product(Pool& pool, const Format& f, const typename Format::X* x, int64_t T, int64_t K, const Output& out) {
#if defined(QUIRE_AMX)
  if constexpr (Format::SUPPORTS_AMX)
    amx_product(pool, f, x, T, K, out);
  else
#endif
    vector_product(pool, f, x, T, K, out);
}

}  // namespace quire
