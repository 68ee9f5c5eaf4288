// Heads and residuals over random sizes without XLA, in memory that ends where they do: against loops in double precision.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "heads.h"
#include "residual.h"

using namespace quire;

using Numbers = std::vector<double>;
const float EPS = 1e-5f;

// An array in either type, and what it holds.
struct Drawn {
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  Numbers values;

  template <typename Random>
  Drawn(Random& random, int64_t size, bool wide) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size; ++i) {
      float x = normal(random);
      if (wide)
        floats.push_back(x);
      else
        halves.push_back(narrow(x)), x = widen(halves.back());
      values.push_back(x);
    }
  }
  char* data() { return floats.empty() ? reinterpret_cast<char*>(halves.data()) : reinterpret_cast<char*>(floats.data()); }
  double at(int64_t i) const { return floats.empty() ? widen(halves[i]) : floats[i]; }
};

Numbers normed(Numbers x, const Drawn* scale, const Drawn* bias, bool centred) {
  double mean = 0, squares = 0, size = static_cast<double>(x.size());
  for (double one : x) mean += one / size;
  for (double& one : x) one -= centred ? mean : 0;
  for (double one : x) squares += one * one / size;
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = x[i] / std::sqrt(squares + EPS) * (scale ? scale->values[i] : 1) + (bias ? bias->values[i] : 0);
  return x;
}

bool near(const Drawn& found, int64_t from, const Numbers& right, bool wide) {
  double most = 1e-3;
  for (double x : right) most = std::max(most, std::abs(x));
  for (size_t i = 0; i < right.size(); ++i)
    if (std::abs(found.at(from + i) - right[i]) > (wide ? 1e-5 : 2e-2) * most) return false;
  return true;
}

Numbers part(const Numbers& of, int64_t from, int64_t size) { return {of.begin() + from, of.begin() + from + size}; }

int main(int argc, char** argv) {
  std::mt19937 random(1);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  int rounds = 50 * (argc > 1 ? std::atoi(argv[1]) : 20);
  for (int round = 0; round < rounds; ++round) {
    const bool wide = below(2);
    {
      const int64_t T = 3, D = 1 + below(70);
      Drawn x(random, T * D, wide), y(random, T * D, wide), sum(random, T * D, wide), norm(random, T * D, wide);
      Drawn scale(random, D, below(2)), bias(random, D, below(2));
      const bool adds = below(2), normed_first = below(2), centred = below(2), biased = centred && below(2);
      Row of_scale{scale.data(), !scale.floats.empty()}, of_bias{biased ? bias.data() : nullptr, !bias.floats.empty()};
      Residual r{D, wide, x.data(), adds ? y.data() : nullptr, {of_scale, {}, false, EPS},
                 {of_scale, of_bias, centred, EPS}, normed_first, sum.data(), norm.data()};
      for (int64_t t = 0; t < T; ++t) r.row(t);
      for (int64_t t = 0; t < T; ++t) {
        Numbers total = part(x.values, t * D, D), more = part(y.values, t * D, D);
        if (normed_first) more = normed(more, &scale, nullptr, false);
        for (int64_t i = 0; adds && i < D; ++i) total[i] += more[i];
        if (adds && !near(sum, t * D, total, wide)) return std::printf("round %d: a sum is wrong\n", round);
        for (int64_t i = 0; adds && i < D; ++i) total[i] = sum.at(t * D + i);
        if (!near(norm, t * D, normed(total, &scale, biased ? &bias : nullptr, centred), wide))
          return std::printf("round %d: a norm is wrong\n", round);
      }
    }
    const int64_t T = 2, N = 1 + below(4), K = 1 + below(2), H = 2 + 2 * below(20), pairs = below(H / 2 + 1);
    const auto kind = static_cast<HeadNorms>(below(4));
    const bool tied = below(2), v_norm = below(2);
    const int64_t G = N + (tied ? 1 : 2) * K;
    Drawn qkv(random, T * G * H, wide), cos(random, T * pairs, true), sin(random, T * pairs, true);
    Drawn q_scale(random, (kind == ALL ? N : 1) * H, true), k_scale(random, (kind == ALL ? K : 1) * H, true);
    Drawn q(random, T * N * H, wide), k(random, T * K * H, wide), v(random, T * K * H, wide);
    Heads h{N, K, G, H, wide, qkv.data(), pairs, cos.floats.data(), sin.floats.data(), kind,
            {{q_scale.data(), true}, {}, false, EPS}, {{k_scale.data(), true}, {}, false, EPS}, {{}, {}, false, EPS},
            tied, v_norm, q.data(), k.data(), v.data()};
    for (int64_t t = 0; t < T; ++t) h.row(t);
    auto turned = [&](int64_t t, int64_t first, int64_t count, const Drawn& scale) {
      Numbers all = part(qkv.values, (t * G + first) * H, count * H);
      if (kind == ALL) all = normed(all, &scale, nullptr, false);
      Numbers found;
      for (int64_t n = 0; n < count; ++n) {
        Numbers head = part(all, n * H, H);
        if (kind == EACH) head = normed(head, &scale, nullptr, false);
        for (int64_t i = 0; i < pairs; ++i) {
          double a = head[i], b = head[pairs + i], c = cos.floats[t * pairs + i], s = sin.floats[t * pairs + i];
          head[i] = a * c - b * s, head[pairs + i] = b * c + a * s;
        }
        if (kind == TURNED) head = normed(head, &scale, nullptr, false);
        found.insert(found.end(), head.begin(), head.end());
      }
      return found;
    };
    for (int64_t t = 0; t < T; ++t) {
      if (!near(q, t * N * H, turned(t, 0, N, q_scale), wide)) return std::printf("round %d: queries are wrong\n", round);
      if (!near(k, t * K * H, turned(t, N, K, k_scale), wide)) return std::printf("round %d: keys are wrong\n", round);
      for (int64_t n = 0; n < K; ++n) {
        Numbers head = part(qkv.values, (t * G + (tied ? N : N + K) + n) * H, H);
        if (!near(v, (t * K + n) * H, v_norm ? normed(head, nullptr, nullptr, false) : head, wide))
          return std::printf("round %d: values are wrong\n", round);
      }
    }
  }
  return 0;
}
