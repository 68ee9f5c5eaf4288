// Conversion of weights to the layouts of the kernels (see formats.h), once, while a model is loaded. C functions that
// Python calls without the GIL.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t LANES = 16;

void run_on_threads(int64_t blocks, void (*run)(const void*, int64_t), const void* context) {
  int64_t num_threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, std::max<int64_t>(1, blocks / 4));
  std::vector<std::thread> threads;
  auto run_share = [=](int64_t t) {
    for (int64_t block = blocks * t / num_threads; block < blocks * (t + 1) / num_threads; ++block) run(context, block);
  };
  for (int64_t t = 1; t < num_threads; ++t) threads.emplace_back(run_share, t);
  run_share(0);
  for (auto& thread : threads) thread.join();
}

// Calls run(block) for every block of sixteen outputs.
template <typename Run>
void for_each_block(int64_t blocks, const Run& run) {
  run_on_threads(
      blocks, [](const void* context, int64_t block) { (*static_cast<const Run*>(context))(block); }, &run);
}

// Copies weights [K, O], with strides in elements, to [O / 16][padded_K / group][16][group], padded with zeros.
template <typename T>
void tile(const T* weights, T* tiles, int64_t K, int64_t padded_K, int64_t O, int64_t group, int64_t stride_k,
          int64_t stride_o) {
  for_each_block((O + LANES - 1) / LANES, [&](int64_t block) {
    T* block_tiles = tiles + block * padded_K * LANES;
    std::memset(block_tiles, 0, padded_K * LANES * sizeof(T));
    int64_t num_lanes = std::min(LANES, O - block * LANES);
    for (int64_t k = 0; k < K; ++k) {
      const T* in = weights + k * stride_k + block * LANES * stride_o;
      T* out = block_tiles + k / group * group * LANES + k % group;
      for (int64_t lane = 0; lane < num_lanes; ++lane) out[lane * group] = in[lane * stride_o];
    }
  });
}

// Packs codes [K, O], a byte each, to [O / 16][padded_K / INPUTS][WORDS][16]. put(words, pair, half_bit, code) adds the
// code of an input to a lane's words: `pair` is the input's pair, and `half_bit` the first bit of its half of a word.
template <int64_t INPUTS, int64_t WORDS, typename Put>
void tile_words(const uint8_t* codes, uint32_t* tiles, int64_t K, int64_t padded_K, int64_t O, const Put& put) {
  for_each_block((O + LANES - 1) / LANES, [&](int64_t block) {
    uint32_t* block_tiles = tiles + block * padded_K / INPUTS * WORDS * LANES;
    std::memset(block_tiles, 0, padded_K / INPUTS * WORDS * LANES * 4);
    int64_t num_lanes = std::min(LANES, O - block * LANES);
    for (int64_t k = 0; k < K; ++k) {
      const uint8_t* in = codes + k * O + block * LANES;
      uint32_t* words = block_tiles + k / INPUTS * WORDS * LANES;
      for (int64_t lane = 0; lane < num_lanes; ++lane) put(words + lane, k % INPUTS / 2, k % 2 * 16, in[lane]);
    }
  });
}

}  // namespace

#pragma GCC visibility push(default)

// Tiles weights [K, O] with strides in elements, to [O / 16][padded_K / group][16][group]. Returns false if elements of
// `size` bytes are not supported.
extern "C" bool quire_tile(const void* weights, void* tiles, int64_t size, int64_t K, int64_t padded_K, int64_t O,
                           int64_t group, int64_t stride_k, int64_t stride_o) {
  if (size == 1)
    tile(static_cast<const uint8_t*>(weights), static_cast<uint8_t*>(tiles), K, padded_K, O, group, stride_k, stride_o);
  else if (size == 2)
    tile(static_cast<const uint16_t*>(weights), static_cast<uint16_t*>(tiles), K, padded_K, O, group, stride_k,
         stride_o);
  else if (size == 4)
    tile(static_cast<const uint32_t*>(weights), static_cast<uint32_t*>(tiles), K, padded_K, O, group, stride_k,
         stride_o);
  else
    return false;
  return true;
}

// Packs 4-bit codes, two a byte ([bytes, O], as in ops/quant/four_bits.py), to [O / 16][padded_K / 8][16].
extern "C" void quire_tile_int4(const uint8_t* packed, uint32_t* tiles, int64_t K, int64_t padded_K, int64_t O) {
  int64_t span = std::min<int64_t>(K, 128), half = span / 2;  // a byte holds inputs k and k + half of a span
  for_each_block((O + LANES - 1) / LANES, [&](int64_t block) {
    uint32_t* block_tiles = tiles + block * padded_K / 8 * LANES;
    std::memset(block_tiles, 0, padded_K / 8 * LANES * 4);
    int64_t num_lanes = std::min(LANES, O - block * LANES);
    auto put = [&](int64_t k, uint32_t code, int64_t lane) {
      block_tiles[k / 8 * LANES + lane] |= code << (k % 8 / 2 * 4 + k % 2 * 16);
    };
    const uint8_t* in = packed + block * LANES;
    for (int64_t begin = 0; begin < K; begin += span) {
      int64_t first = std::min(begin, K - span);  // the last span ends with the last input, and may overlap
      for (int64_t k = first; k < first + half; ++k, in += O)
        for (int64_t lane = 0; lane < num_lanes; ++lane) {
          if (k >= begin) put(k, in[lane] & 15, lane);
          if (k + half >= begin) put(k + half, in[lane] >> 4, lane);
        }
    }
  });
}

// Packs 5-bit codes [K, O], a byte each, to [O / 16][padded_K / 32][5][16]: the layout of Packed5.
extern "C" void quire_tile_int5(const uint8_t* codes, uint32_t* tiles, int64_t K, int64_t padded_K, int64_t O) {
  tile_words<32, 5>(codes, tiles, K, padded_K, O, [](uint32_t* words, int64_t pair, int64_t half_bit, uint32_t code) {
    if (pair < 15)
      words[pair / 3 * LANES] |= code << (half_bit + pair % 3 * 5);
    else
      for (int64_t word = 0; word < 5; ++word) words[word * LANES] |= (code >> word & 1) << (half_bit + 15);
  });
}

// Packs 6-bit codes [K, O], a byte each, to [O / 16][padded_K / 16][3][16]: the layout of Packed6.
extern "C" void quire_tile_int6(const uint8_t* codes, uint32_t* tiles, int64_t K, int64_t padded_K, int64_t O) {
  tile_words<16, 3>(codes, tiles, K, padded_K, O, [](uint32_t* words, int64_t pair, int64_t half_bit, uint32_t code) {
    if (pair < 6) {
      words[pair / 2 * LANES] |= code << (half_bit + pair % 2 * 6);
    } else {
      words[(pair - 6) * LANES] |= code % 16 << (half_bit + 12);
      words[2 * LANES] |= code / 16 << (half_bit + 2 * pair);
    }
  });
}

#pragma GCC visibility pop
