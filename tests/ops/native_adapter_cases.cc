// Adapters over random sizes without XLA, in memory that ends where they do: against loops in double precision, and a row's bits
// alone.
#include <cmath>
#include <cstdio>
#include <random>

#include "adapter.h"
#include "native_pool.h"

using namespace quire;

int main(int argc, char** argv) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  int rounds = 20 * (argc > 1 ? std::atoi(argv[1]) : 20);
  for (int round = 0; round < rounds; ++round) {
    const bool wide = below(2);
    const int64_t T = 1 + below(9), D = 1 + below(70), R = 1 + below(40), P = 1 + below(3), slots = 1 + below(4), each = 1 + below(2);
    std::vector<int32_t> ends, whose;
    for (int64_t p = 0, at = 0; p < P; ++p) ends.push_back(at), ends.push_back(at += 1 + below(600));
    const int64_t O = ends.back(), which = below(each);
    for (int64_t t = 0; t < T; ++t) whose.push_back(below(slots + 1));
    // An array in either type, and what it holds.
    struct Drawn {
      std::vector<float> values;
      std::vector<uint16_t> halves;
      const char* at(bool wide) const {
        return wide ? reinterpret_cast<const char*>(values.data()) : reinterpret_cast<const char*>(halves.data());
      }
    };
    auto draw = [&](int64_t size) {
      Drawn found;
      for (int64_t i = 0; i < size; ++i) {
        float v = normal(random);
        found.halves.push_back(narrow(v)), found.values.push_back(wide ? v : widen(found.halves.back()));
      }
      return found;
    };
    const int64_t matrices = slots * each;
    Drawn x = draw(T * D), down = draw(matrices * D * P * R), up = draw(matrices * R * O), longer = draw(matrices * O), y = draw(T * O);
    auto of = [&](int64_t t, int64_t count, float* out) {
      Adapter a{count, D, O, x.at(wide) + t * D * (wide ? 4 : 2), wide, whose.data() + t, slots, each, which,
                {down.at(wide), wide, D, P * R}, {up.at(wide), wide, R, O}, longer.values.data(), ends.data(), P, out};
      Pool pool;
      wide ? a.run<true>(pool) : a.run<false>(pool);
    };
    std::vector<float> out = y.values;
    of(0, T, out.data());
    for (int64_t t = 0; t < T; ++t) {
      std::vector<float> alone(y.values.begin() + t * O, y.values.begin() + (t + 1) * O);
      of(t, 1, alone.data());
      if (std::memcmp(alone.data(), &out[t * O], O * sizeof(float))) return std::printf("round %d: other bits alone\n", round);
      for (int64_t p = 0; p < P; ++p)
        for (int64_t o = ends[2 * p]; o < ends[2 * p + 1]; ++o) {
          double right = y.values[t * O + o], size = 1;
          if (whose[t] < slots) {
            int64_t own = whose[t] * each + which;
            right += longer.values[own * O + o] * right;
            for (int64_t r = 0; r < R; ++r) {
              double inner = 0;
              for (int64_t d = 0; d < D; ++d) inner += double(x.values[t * D + d]) * down.values[(own * D + d) * P * R + p * R + r];
              double more = inner * up.values[(own * R + r) * O + o];
              right += more, size += std::abs(more);
            }
          }
          if (std::abs(out[t * O + o] - right) > 1e-5 * size) return std::printf("round %d: row %d is wrong\n", round, int(t));
        }
    }
  }
  return 0;
}
