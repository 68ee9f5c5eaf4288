// Heads and residuals of random sizes without XLA, in buffers of exact size: against loops in double precision.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "heads.h"
#include "residual.h"

using namespace quire;

using Values = std::vector<double>;
const float EPS = 1e-5f;

// A random array in float32 or bfloat16, and its values.
struct RandomArray {
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  Values values;

  template <typename Random>
  RandomArray(Random& random, int64_t size, bool is_float32) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size; ++i) {
      float x = normal(random);
      if (is_float32)
        floats.push_back(x);
      else
        halves.push_back(float_to_bf16(x)), x = bf16_to_float(halves.back());
      values.push_back(x);
    }
  }
  char* data() {
    return floats.empty() ? reinterpret_cast<char*>(halves.data()) : reinterpret_cast<char*>(floats.data());
  }
  double at(int64_t i) const { return floats.empty() ? bf16_to_float(halves[i]) : floats[i]; }
};

Values normalize(Values x, const RandomArray* scale, const RandomArray* bias, bool centred) {
  double mean = 0, squares = 0, size = static_cast<double>(x.size());
  for (double value : x) mean += value / size;
  for (double& value : x) value -= centred ? mean : 0;
  for (double value : x) squares += value * value / size;
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = x[i] / std::sqrt(squares + EPS) * (scale ? scale->values[i] : 1) + (bias ? bias->values[i] : 0);
  return x;
}

bool is_close(const RandomArray& actual, int64_t offset, const Values& expected, bool is_float32) {
  double max_abs = 1e-3;
  for (double x : expected) max_abs = std::max(max_abs, std::abs(x));
  for (size_t i = 0; i < expected.size(); ++i)
    if (std::abs(actual.at(offset + i) - expected[i]) > (is_float32 ? 1e-5 : 2e-2) * max_abs) return false;
  return true;
}

Values slice(const Values& values, int64_t from, int64_t size) {
  return {values.begin() + from, values.begin() + from + size};
}

int main(int argc, char** argv) {
  std::mt19937 random(1);
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  int rounds = 50 * (argc > 1 ? std::atoi(argv[1]) : 20);
  for (int round = 0; round < rounds; ++round) {
    const bool is_float32 = below(2);
    {
      const int64_t T = 3, D = 1 + below(70);
      RandomArray x(random, T * D, is_float32), y(random, T * D, is_float32);
      RandomArray sum(random, T * D, is_float32), norm(random, T * D, is_float32);
      RandomArray scale(random, D, below(2)), bias(random, D, below(2));
      const bool has_y = below(2), norms_y = below(2), centred = below(2), has_bias = centred && below(2);
      Row scale_row{scale.data(), !scale.floats.empty()};
      Row bias_row{has_bias ? bias.data() : nullptr, !bias.floats.empty()};
      Residual r{D, is_float32, x.data(), has_y ? y.data() : nullptr, {scale_row, {}, false, EPS},
                 {scale_row, bias_row, centred, EPS}, norms_y, sum.data(), norm.data()};
      for (int64_t t = 0; t < T; ++t) r.process_row(t);
      for (int64_t t = 0; t < T; ++t) {
        Values total = slice(x.values, t * D, D), addend = slice(y.values, t * D, D);
        if (norms_y) addend = normalize(addend, &scale, nullptr, false);
        for (int64_t i = 0; has_y && i < D; ++i) total[i] += addend[i];
        if (has_y && !is_close(sum, t * D, total, is_float32)) return std::printf("round %d: a sum is wrong\n", round);
        for (int64_t i = 0; has_y && i < D; ++i) total[i] = sum.at(t * D + i);
        if (!is_close(norm, t * D, normalize(total, &scale, has_bias ? &bias : nullptr, centred), is_float32))
          return std::printf("round %d: a norm is wrong\n", round);
      }
    }
    const int64_t T = 2, N = 1 + below(4), K = 1 + below(2), H = 2 + 2 * below(20), pairs = below(H / 2 + 1);
    const auto kind = static_cast<HeadNorms>(below(4));
    const bool tied = below(2), v_norm = below(2);
    const int64_t G = N + (tied ? 1 : 2) * K;  // heads of a row of qkv
    RandomArray qkv(random, T * G * H, is_float32), cos(random, T * pairs, true), sin(random, T * pairs, true);
    RandomArray q_scale(random, (kind == ALL_HEADS ? N : 1) * H, true);
    RandomArray k_scale(random, (kind == ALL_HEADS ? K : 1) * H, true);
    RandomArray q(random, T * N * H, is_float32), k(random, T * K * H, is_float32), v(random, T * K * H, is_float32);
    Heads h{N, K, G, H, is_float32, qkv.data(), pairs, cos.floats.data(), sin.floats.data(), kind,
            {{q_scale.data(), true}, {}, false, EPS}, {{k_scale.data(), true}, {}, false, EPS}, {{}, {}, false, EPS},
            tied, v_norm, q.data(), k.data(), v.data()};
    for (int64_t t = 0; t < T; ++t) h.process_row(t);
    auto reference_heads = [&](int64_t t, int64_t first, int64_t count, const RandomArray& scale) {
      Values all = slice(qkv.values, (t * G + first) * H, count * H);
      if (kind == ALL_HEADS) all = normalize(all, &scale, nullptr, false);
      Values heads;
      for (int64_t n = 0; n < count; ++n) {
        Values head = slice(all, n * H, H);
        if (kind == PER_HEAD) head = normalize(head, &scale, nullptr, false);
        for (int64_t i = 0; i < pairs; ++i) {
          double a = head[i], b = head[pairs + i], c = cos.floats[t * pairs + i], s = sin.floats[t * pairs + i];
          head[i] = a * c - b * s, head[pairs + i] = b * c + a * s;
        }
        if (kind == PER_HEAD_AFTER_ROPE) head = normalize(head, &scale, nullptr, false);
        heads.insert(heads.end(), head.begin(), head.end());
      }
      return heads;
    };
    for (int64_t t = 0; t < T; ++t) {
      if (!is_close(q, t * N * H, reference_heads(t, 0, N, q_scale), is_float32))
        return std::printf("round %d: queries are wrong\n", round);
      if (!is_close(k, t * K * H, reference_heads(t, N, K, k_scale), is_float32))
        return std::printf("round %d: keys are wrong\n", round);
      for (int64_t n = 0; n < K; ++n) {
        Values head = slice(qkv.values, (t * G + (tied ? N : N + K) + n) * H, H);
        if (!is_close(v, (t * K + n) * H, v_norm ? normalize(head, nullptr, nullptr, false) : head, is_float32))
          return std::printf("round %d: values are wrong\n", round);
      }
    }
  }
  return 0;
}
