// Entry to sampling.
#include "sampling.h"

#include "ffi.h"
#include "threads.h"

namespace quire {
namespace {

// Arrays: the logits, then the leaves of `SlotState` and `SamplingInputs` in their order. Results: the leaves of `Sampled`.
const char* sample(const Call& call) {
  sampling::SamplingCall a{};
  Buffer logits = call.array(0), bias = call.array(1), logprob_token_ids = call.array(5), bans = call.array(19);
  a.R = logits.dim(0), a.V = logits.dim(1), a.J = bias.dim(1), a.X = bans.dim(1), a.K = call.result(3).dim(1);
  a.L = logprob_token_ids.dim(1);
  a.logits = logits.data<float>();
  a.bias = bias.data<float>();
  a.stop = call.array(2).data<bool>();
  a.output_counts = call.array(3).data<int32_t>();
  a.prompt = call.array(4).data<bool>();
  a.logprob_token_ids = logprob_token_ids.data<int32_t>();
  a.slots = call.array(6).data<int32_t>();
  a.bias_rows = call.array(7).data<int32_t>();
  a.drafted = call.array(8).data<int32_t>();
  a.positions = call.array(9).data<int32_t>();
  a.seeds = call.array(10).data<uint32_t>();
  a.temperature = call.array(11).data<float>();
  a.top_k = call.array(12).data<int32_t>();
  a.top_p = call.array(13).data<float>();
  a.min_p = call.array(14).data<float>();
  a.repetition_penalty = call.array(15).data<float>();
  a.presence_penalty = call.array(16).data<float>();
  a.frequency_penalty = call.array(17).data<float>();
  a.ban_stop = call.array(18).data<bool>();
  a.bans = bans.data<int32_t>();
  a.targets = call.array(20).data<int32_t>();
  a.is_biased = call.array(21).data<bool>();
  a.wants_logprobs = call.array(22).data<bool>();
  a.tokens = call.result(0).data<int32_t>();
  a.logprobs = call.result(1).data<float>();
  a.ranks = call.result(2).data<int32_t>();
  a.top_ids = call.result(3).data<int32_t>();
  a.top_logprobs = call.result(4).data<float>();
  a.token_id_logprobs = call.result(5).data<float>();
  a.ok = call.result(6).data<bool>();
  int64_t num_slots = bias.dim(0);

  Pool pool = call.pool();
  parallel(pool, a.R, [&](int64_t r) {
    static thread_local sampling::Scratch scratch;
    sampling::RowSampler{a, r, scratch}.run(num_slots);
  });
  return nullptr;
}

constexpr auto F32 = dtype::F32, S32 = dtype::S32, U32 = dtype::U32, PRED = dtype::PRED;

}  // namespace

QUIRE_KERNEL(sample, {{F32, F32, PRED, S32, PRED, S32, S32, S32, S32, S32, U32, F32, S32, F32, F32, F32, F32, F32, PRED,
                       S32, S32, PRED, PRED},
                      {}})

}  // namespace quire
