// The attention kernel without XLA, against a softmax in double precision, for the compiler's sanitizers: build it with
// -std=c++17 -O1 -g -pthread, -isystem of jax.ffi.include_dir(), -I ops/native, and -fsanitize=address,undefined or
// -fsanitize=thread. Pages, tables and rows have exact sizes, so that accesses out of bounds are found.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "attention.h"

namespace {

using quire::attention::AttentionCall;
using quire::attention::Int4Pair;

constexpr int THREADS = 4;

template <typename Run>
void run_parallel(int64_t chunks, const Run& run) {
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < THREADS; ++i)
    threads.emplace_back([&] {
      for (int64_t chunk; (chunk = next++) < chunks;) run(chunk);
    });
  for (std::thread& t : threads) t.join();
}

struct Random {
  std::mt19937 engine;
  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(engine); }
  int64_t one_of(std::vector<int64_t> list) { return list[below(static_cast<int64_t>(list.size()))]; }
  float normal() { return std::normal_distribution<float>()(engine); }
};

template <typename X>
std::vector<X> normals(Random& random, int64_t n) {
  std::vector<X> x(n);
  for (X& value : x) value = quire::attention::convert<X>(random.normal());
  return x;
}

template <typename T>
double element(const void* p, int64_t i) {
  return quire::attention::convert<float>(static_cast<const T*>(p)[i]);
}
template <>
double element<int8_t>(const void* p, int64_t i) {
  return static_cast<const int8_t*>(p)[i];
}

template <>
double element<Int4Pair>(const void* p, int64_t i) {
  return (static_cast<const Int4Pair*>(p)[i / 2].codes >> i % 2 * 4 & 15) - 8;
}

// A 4-bit key before the Hadamard rotation, which is its own inverse.
std::vector<double> unrotated(const Int4Pair* key, int64_t H) {
  std::vector<double> values(H);
  int64_t block = H & -H;
  for (int64_t i = 0; i < H; ++i) values[i] = element<Int4Pair>(key, i) / std::sqrt(double(block));
  for (int64_t step = 1; step < block; step *= 2)
    for (int64_t i = 0; i < H; ++i)
      if (!(i & step)) {
        double left = values[i], right = values[i + step];
        values[i] = left + right, values[i + step] = left - right;
      }
  return values;
}

// The largest error of a random step, beyond the rounding of attention weights.
template <typename Page, typename X, typename New>
double step_error(int seed) {
  Random random{std::mt19937(seed)};
  AttentionCall a{};
  int64_t group = random.one_of({1, 2, 3, 9});
  a.K = random.one_of({1, 2, 4}), a.N = a.K * group, a.H = random.one_of({16, 64, 20, 33, 96, 128});
  constexpr bool IS_INT4 = std::is_same_v<Page, Int4Pair>;
  if (IS_INT4) a.H += a.H % 2;
  bool latent = random.below(4) == 0 && !IS_INT4, has_scales = sizeof(Page) == 1;
  a.V = latent ? a.H - random.below(9) : a.H;
  a.S = random.one_of({5, 8, 16, 32}), a.B = 1 + random.below(4), a.is_float32 = sizeof(New) == 4;
  a.scoring = {0.2f, random.below(3) ? 0.0f : 5.0f, random.one_of({int64_t{1} << 40, int64_t{1} << 40, 1, 70})};
  a.scoring.chunked = random.below(2), a.scoring.lookahead = random.one_of({0, 0, 3, int64_t{1} << 29});

  std::vector<int32_t> positions, starts{0}, slots, lengths;
  for (int64_t b = 0; b < a.B; ++b) {
    int64_t rows = random.one_of({0, 1, 1, 5, 70}), start = random.one_of({0, 60, 130, 505, 1020});
    for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(start + r));
    starts.push_back(static_cast<int32_t>(positions.size()));
    lengths.push_back(static_cast<int32_t>(rows ? start + rows : 0));
    a.M = std::max(a.M, (start + rows + a.S - 1) / a.S);
  }
  a.P = 1 + a.B * a.M;
  std::vector<int32_t> tables(a.B * a.M);
  for (int64_t i = 0; i < a.B * a.M; ++i) tables[i] = static_cast<int32_t>(i + 1);
  std::shuffle(tables.begin(), tables.end(), random.engine);
  auto slot_index = [&](int64_t b, int64_t p) { return tables[b * a.M + p / a.S] * a.S + p % a.S; };
  for (int64_t b = 0; b < a.B; ++b)
    for (int32_t row = starts[b]; row < starts[b + 1]; ++row)
      slots.push_back(static_cast<int32_t>(slot_index(b, positions[row])));
  a.T = static_cast<int64_t>(positions.size()) + random.below(3);
  positions.resize(a.T), slots.resize(a.T);

  auto q = normals<New>(random, a.T * a.N * a.H), k = normals<New>(random, a.T * a.K * a.H);
  auto v = normals<New>(random, a.T * a.K * a.V);
  constexpr int64_t ELEMENT_DIMS = quire::attention::ELEMENT_DIMS<Page>;
  std::vector<Page> k_pages(a.P * a.S * a.K * a.H / ELEMENT_DIMS);
  std::vector<Page> v_pages(latent ? 0 : a.P * a.S * a.K * a.V / ELEMENT_DIMS);
  std::vector<float> k_scale(a.P * a.S * a.K), v_scale(a.P * a.S * a.K);
  float nan = std::nanf("");
  auto scale_index = [&](int64_t slot, int64_t head) { return slot / a.S * a.K * a.S + head * a.S + slot % a.S; };
  auto random_element = [&](int64_t codes, [[maybe_unused]] float number) {
    if constexpr (IS_INT4)
      return Int4Pair{static_cast<uint8_t>(random.below(256))};
    else
      return has_scales ? static_cast<Page>(random.below(codes) - 127) : quire::attention::convert<Page>(number);
  };
  auto fill = [&](std::vector<Page>& pages, std::vector<float>& scale, int64_t width) {
    for (int64_t i = 0; i < static_cast<int64_t>(pages.size()); ++i) pages[i] = random_element(200, nan);
    std::fill(scale.begin(), scale.end(), nan);
    for (int64_t b = 0; b < a.B && !pages.empty(); ++b)
      for (int64_t p = 0; p < lengths[b]; ++p)
        for (int64_t i = 0; i < a.K * width; i += ELEMENT_DIMS) {
          int64_t index = (slot_index(b, p) * a.K * width + i) / ELEMENT_DIMS;
          pages[index] = random_element(255, random.normal());
          scale[scale_index(slot_index(b, p), i / width)] = 0.02f * static_cast<float>(1 + (p + i / width) % 3);
        }
  };
  fill(k_pages, k_scale, a.H), fill(v_pages, v_scale, a.V);
  // Runs of rows that see up to the end of their run.
  std::vector<int32_t> sees(positions);
  for (int64_t b = 0; b < a.B; ++b)
    for (int32_t row = starts[b]; row < starts[b + 1];) {
      int32_t stop = std::min<int32_t>(starts[b + 1], row + 1 + static_cast<int32_t>(random.one_of({0, 0, 3, 40})));
      for (int32_t r = row; r < stop; ++r) sees[r] = positions[stop - 1];
      row = stop;
    }
  if (random.below(3) == 0) a.sees = sees.data();
  std::vector<New> out(a.T * a.N * a.V);
  std::vector<float> sinks(a.N, 0.5f);
  a.q = q.data(), a.out = out.data(), a.k_pages = k_pages.data(), a.v_pages = latent ? nullptr : v_pages.data();
  if (random.below(4)) a.k = k.data(), a.v = v.data();
  if (random.below(2)) a.sinks = sinks.data();
  if (has_scales) a.k_scale = k_scale.data(), a.v_scale = v_scale.data();
  a.positions = positions.data(), a.starts = starts.data(), a.tables = tables.data(), a.slots = slots.data();
  quire::attention::attend<Page, X>(a, THREADS, [](int64_t chunks, const auto& run) { run_parallel(chunks, run); });

  double max_error = 0;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t row = starts[b]; row < starts[b + 1]; ++row)
      for (int64_t n = 0; n < a.N; ++n) {
        int64_t head = n / group, first = std::max<int64_t>(0, positions[row] - a.scoring.window + 1);
        if (a.scoring.chunked) first = positions[row] / a.scoring.window * a.scoring.window;
        int64_t last = std::min<int64_t>(positions[row] + a.scoring.lookahead, positions[starts[b + 1] - 1]);
        if (a.sees) last = a.sees[row];
        std::vector<double> sums(a.V), rounding(a.V), scores;
        double best = a.sinks ? 0.5 : -1e30, total = 0;
        for (int64_t p = first; p <= last; ++p) {
          double score = 0;
          int64_t key = slot_index(b, p) * a.K + head;
          std::vector<double> key_values(a.H);
          if constexpr (IS_INT4)
            key_values = unrotated(static_cast<const Int4Pair*>(a.k_pages) + key * a.H / 2, a.H);
          else
            for (int64_t h = 0; h < a.H; ++h) key_values[h] = element<Page>(a.k_pages, key * a.H + h);
          for (int64_t h = 0; h < a.H; ++h) score += element<New>(a.q, (row * a.N + n) * a.H + h) * key_values[h];
          score *= a.scoring.scale * (has_scales ? k_scale[scale_index(slot_index(b, p), head)] : 1.0);
          if (a.scoring.soft_cap) score = a.scoring.soft_cap * std::tanh(score / a.scoring.soft_cap);
          scores.push_back(score), best = std::max(best, score);
        }
        if (a.sinks) total = std::exp(0.5 - best);
        for (int64_t p = first; p <= last; ++p) {
          double weight = std::exp(scores[p - first] - best);
          int64_t value = slot_index(b, p) * a.K + head;
          total += weight;
          for (int64_t i = 0; i < a.V; ++i) {
            double v = latent ? element<Page>(a.k_pages, value * a.H + i) : element<Page>(a.v_pages, value * a.V + i);
            if (has_scales) v *= (latent ? k_scale : v_scale)[scale_index(slot_index(b, p), head)];
            double term = weight * v;
            sums[i] += term;
            // Attention weights are rounded to bfloat16.
            if (quire::attention::USES_BF16_PAIRS<X>) rounding[i] += std::fabs(term) / 256;
          }
        }
        for (int64_t i = 0; i < a.V; ++i)
          max_error = std::max(max_error, std::fabs(element<New>(a.out, (row * a.N + n) * a.V + i) - sums[i] / total) -
                                      rounding[i] / total);
      }
  return max_error;
}

}  // namespace

int main(int argc, char** argv) {
  int cases = argc > 1 ? std::atoi(argv[1]) : 20, failures = 0;
  for (int seed = 0; seed < cases; ++seed) {
    double errors[] = {step_error<float, float, float>(seed), step_error<uint16_t, uint16_t, uint16_t>(seed),
                       step_error<int8_t, uint16_t, uint16_t>(seed), step_error<int8_t, float, float>(seed),
                       step_error<uint16_t, float, float>(seed), step_error<float, float, uint16_t>(seed),
                       step_error<Int4Pair, float, float>(seed)};
    failures += !(step_error<Int4Pair, uint16_t, uint16_t>(seed) < 0.1);  // queries are rounded once more
    for (double error : errors) failures += !(error < 0.02);
  }
  std::printf("%d failures of %d\n", failures, 8 * cases);
  return failures != 0;
}
