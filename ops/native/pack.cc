// Weights laid out for the kernels, once, while a model is loaded. Plain C, called from Python without its lock.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t LANES = 16;

void spread(int64_t blocks, void (*run)(const void*, int64_t), const void* what) {
  int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, std::max<int64_t>(1, blocks / 4));
  std::vector<std::thread> others;
  auto part = [=](int64_t t) {
    for (int64_t block = blocks * t / threads; block < blocks * (t + 1) / threads; ++block) run(what, block);
  };
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(part, t);
  part(0);
  for (auto& thread : others) thread.join();
}

template <typename Run>
void each_block(int64_t blocks, const Run& run) {
  spread(blocks, [](const void* what, int64_t block) { (*static_cast<const Run*>(what))(block); }, &run);
}

template <typename T>
void tile(const T* from, T* to, int64_t K, int64_t padded, int64_t O, int64_t group, int64_t stride_k,
          int64_t stride_o) {
  each_block((O + LANES - 1) / LANES, [&](int64_t block) {
    T* out = to + block * padded * LANES;
    std::memset(out, 0, padded * LANES * sizeof(T));
    int64_t lanes = std::min(LANES, O - block * LANES);
    for (int64_t k = 0; k < K; ++k) {
      const T* in = from + k * stride_k + block * LANES * stride_o;
      T* at = out + k / group * group * LANES + k % group;
      for (int64_t lane = 0; lane < lanes; ++lane) at[lane * group] = in[lane * stride_o];
    }
  });
}

// Codes [K, O], a byte each, to [O / 16][padded / INPUTS][WORDS][16]. `put` adds a code to a lane's words, by the pair of
// inputs that it belongs to and the bit at which its half of a word begins.
template <int64_t INPUTS, int64_t WORDS, typename Put>
void tile_words(const uint8_t* from, uint32_t* to, int64_t K, int64_t padded, int64_t O, const Put& put) {
  each_block((O + LANES - 1) / LANES, [&](int64_t block) {
    uint32_t* out = to + block * padded / INPUTS * WORDS * LANES;
    std::memset(out, 0, padded / INPUTS * WORDS * LANES * 4);
    int64_t lanes = std::min(LANES, O - block * LANES);
    for (int64_t k = 0; k < K; ++k) {
      const uint8_t* in = from + k * O + block * LANES;
      uint32_t* words = out + k / INPUTS * WORDS * LANES;
      for (int64_t lane = 0; lane < lanes; ++lane) put(words + lane, k % INPUTS / 2, k % 2 * 16, in[lane]);
    }
  });
}

}  // namespace

#pragma GCC visibility push(default)

// [K, O] with strides in elements, to [O / 16][padded / group][16][group]. False: elements of `size` bytes are none of these.
extern "C" bool quire_tile(const void* from, void* to, int64_t size, int64_t K, int64_t padded, int64_t O,
                           int64_t group, int64_t stride_k, int64_t stride_o) {
  if (size == 1)
    tile(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to), K, padded, O, group, stride_k, stride_o);
  else if (size == 2)
    tile(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), K, padded, O, group, stride_k, stride_o);
  else if (size == 4)
    tile(static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to), K, padded, O, group, stride_k, stride_o);
  else
    return false;
  return true;
}

// Codes of four bits, two a byte ([bytes, O], as in ops/quant/four_bits.py), to [O / 16][padded / 8][16]; see formats.h.
extern "C" void quire_tile_int4(const uint8_t* from, uint32_t* to, int64_t K, int64_t padded, int64_t O) {
  int64_t side = std::min<int64_t>(K, 128), half = side / 2;
  each_block((O + LANES - 1) / LANES, [&](int64_t block) {
    uint32_t* out = to + block * padded / 8 * LANES;
    std::memset(out, 0, padded / 8 * LANES * 4);
    int64_t lanes = std::min(LANES, O - block * LANES);
    auto put = [&](int64_t k, uint32_t code, int64_t lane) {
      out[k / 8 * LANES + lane] |= code << (k % 8 / 2 * 4 + k % 2 * 16);
    };
    const uint8_t* in = from + block * LANES;
    for (int64_t begin = 0; begin < K; begin += side) {
      int64_t first = std::min(begin, K - side);  // the last block ends with the last input
      for (int64_t k = first; k < first + half; ++k, in += O)
        for (int64_t lane = 0; lane < lanes; ++lane) {
          if (k >= begin) put(k, in[lane] & 15, lane);
          if (k + half >= begin) put(k + half, in[lane] >> 4, lane);
        }
    }
  });
}

// Codes of five bits [K, O], a byte each, to [O / 16][padded / 32][5][16]; see formats.h.
extern "C" void quire_tile_int5(const uint8_t* from, uint32_t* to, int64_t K, int64_t padded, int64_t O) {
  tile_words<32, 5>(from, to, K, padded, O, [](uint32_t* words, int64_t pair, int64_t half, uint32_t code) {
    if (pair < 15)
      words[pair / 3 * LANES] |= code << (half + pair % 3 * 5);
    else
      for (int64_t word = 0; word < 5; ++word) words[word * LANES] |= (code >> word & 1) << (half + 15);
  });
}

// Codes of six bits [K, O], a byte each, to [O / 16][padded / 16][3][16]; see formats.h.
extern "C" void quire_tile_int6(const uint8_t* from, uint32_t* to, int64_t K, int64_t padded, int64_t O) {
  tile_words<16, 3>(from, to, K, padded, O, [](uint32_t* words, int64_t pair, int64_t half, uint32_t code) {
    if (pair < 6) {
      words[pair / 2 * LANES] |= code << (half + pair % 2 * 6);
    } else {
      words[(pair - 6) * LANES] |= code % 16 << (half + 12);
      words[2 * LANES] |= code / 16 << (half + 2 * pair);
    }
  });
}

#pragma GCC visibility pop
