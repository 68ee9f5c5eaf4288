// Sampling in random cases without XLA: greedy tokens against a search for the maximum, sampled ones against a sort.
#include <cstdio>
#include <memory>
#include <random>

#include "sampling.h"

using namespace quire;

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  auto coin = [&] { return random() % 2 == 0; };
  for (int round = 0; round < 400; ++round) {
    constexpr int64_t SIZES[] = {1, 2, 15, 16, 17, 255, 257, 700, 3001};
    const int64_t R = 3, B = 2, X = 4, V = SIZES[below(9)], K = std::min<int64_t>(20, V), L = 5;
    const int64_t J = 1 + below(4);
    std::vector<float> logits(R * V), bias(B * J * V);
    std::vector<int32_t> bias_rows(R), drafted(R * J, -1), logprob_token_ids(B * L);
    std::vector<int32_t> counts(B * V), slots(R), positions(R), top_k(R), bans(R * X, -1), targets(R, -1);
    std::vector<uint32_t> seeds(2 * R);
    std::vector<float> temperature(R), top_p(R, 1), min_p(R), repetition(R, 1), presence(R), frequency(R);
    std::unique_ptr<bool[]> stop(new bool[B * V]), prompt(new bool[B * V]), flags(new bool[3 * R]()), ok(new bool[R]);
    for (auto& x : logits) x = normal(random) * 3;
    for (auto& x : bias) x = normal(random);
    for (auto& x : counts) x = static_cast<int32_t>(below(3));
    for (auto& x : logprob_token_ids) x = static_cast<int32_t>(below(V + 2)) - 1;
    for (int64_t i = 0; i < B * V; ++i) stop[i] = below(9) == 0, prompt[i] = coin();
    for (auto& x : seeds) x = random();
    bool is_plain = coin();
    for (int64_t r = 0; r < R; ++r) {
      slots[r] = static_cast<int32_t>(below(B)), positions[r] = static_cast<int32_t>(below(1000));
      if (coin()) temperature[r] = 1.5f;
      if (coin()) top_k[r] = static_cast<int32_t>(below(V + 5));
      if (coin()) top_p[r] = static_cast<float>(below(100)) / 100;
      if (coin()) min_p[r] = 0.02f;
      flags[r] = coin();
      if (is_plain) continue;
      repetition[r] = 1.2f, presence[r] = 0.1f, frequency[r] = -0.1f;
      flags[R + r] = coin(), flags[2 * R + r] = coin();
      bias_rows[r] = static_cast<int32_t>(below(J));
      for (int64_t j = 0; j < bias_rows[r]; ++j) drafted[r * J + j] = static_cast<int32_t>(below(V));
      bans[r * X + below(X)] = static_cast<int32_t>(below(V + 3));
      if (below(4) == 0) targets[r] = static_cast<int32_t>(below(V));
    }
    std::vector<int32_t> tokens(R), ranks(R), top_ids(R * K);
    std::vector<float> logprobs(R), top_logprobs(R * K), token_id_logprobs(R * L);
    sampling::SamplingCall a{R, V, J, X, K, L, logits.data(), bias.data(), stop.get(), counts.data(), prompt.get(),
                             logprob_token_ids.data(), slots.data(), bias_rows.data(), drafted.data(), positions.data(),
                             seeds.data(), temperature.data(), top_k.data(), top_p.data(), min_p.data(),
                             repetition.data(), presence.data(), frequency.data(), flags.get() + R, bans.data(),
                             targets.data(), flags.get() + 2 * R, flags.get(), tokens.data(), logprobs.data(),
                             ranks.data(), top_ids.data(), top_logprobs.data(), token_id_logprobs.data(), ok.get()};
    sampling::Scratch scratch;
    for (int64_t r = 0; r < R; ++r) sampling::RowSampler{a, r, scratch}.run(B);
    for (int64_t r = 0; is_plain && r < R; ++r) {
      std::vector<float> sorted(logits.begin() + r * V, logits.begin() + (r + 1) * V);
      std::sort(sorted.begin(), sorted.end(), std::greater<float>());
      float sampled_logit = logits[r * V + tokens[r]];
      bool is_greedy = temperature[r] == 0 || top_p[r] == 0 || top_k[r] == 1;
      int64_t num_allowed = is_greedy ? 1 : top_k[r] > 0 ? std::min<int64_t>(top_k[r], V) : V;
      if (!ok[r] || sampled_logit < sorted[num_allowed - 1])
        return std::printf("round %d: row %d has token %d\n", round, int(r), tokens[r]);
      if (flags[r] && (top_ids[r * K] < 0 || logits[r * V + top_ids[r * K]] != sorted[0]))
        return std::printf("round %d: the likeliest token of row %d does not come first\n", round, int(r));
    }
  }
  return 0;
}
