"""Every sampling implementation against float64 references and exact counts; batch invariance."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from scipy import special, stats

from quire.ops import native, sampling
from quire.ops.native import build, kernel_names
from quire.ops.sampling import (
    BANNED,
    BROKEN,
    MAX_BANS,
    MAX_LOGPROBS,
    MAX_WANTED,
    SamplingInputs,
    branchless,
    count_tokens,
    empty_state,
    replace_row,
    xla,
)
from quire.tests.support.cases import thinned

OFF = {
    "slots_R": (np.int32, 0),
    "bias_rows_R": (np.int32, 0),
    "positions_R": (np.int32, 0),
    "temperature_R": (np.float32, 0),
    "top_k_R": (np.int32, 0),
    "top_p_R": (np.float32, 1),
    "min_p_R": (np.float32, 0),
    "repetition_penalty_R": (np.float32, 1),
    "presence_penalty_R": (np.float32, 0),
    "frequency_penalty_R": (np.float32, 0),
    "ban_stop_R": (bool, False),
    "targets_R": (np.int32, -1),
    "biased_R": (bool, False),
    "wants_logprobs_R": (bool, False),
}

SAMPLERS = [
    "xla",
    *(f"native {isa}" for isa in build.isas() if "emulated" not in isa),
    "branchless",
]
SLOTS = 8  # most tests share 8 or 32 rows, since each shape is compiled
V = 700
DRAFTS = 2


@pytest.fixture(scope="module", params=thinned(SAMPLERS, SAMPLERS[:2]))
def implementation(request):
    """`sample` of XLA, of the branchless GPU code and of the CPU kernel per instruction set."""
    name, _, isa = request.param.partition(" ")
    with pytest.MonkeyPatch.context() as patch:
        if name == "branchless":
            patch.setattr(branchless, "on_gpu", lambda: True)  # it computes the same anywhere
        if isa:
            patch.setenv("QUIRE_NATIVE", isa)
            if not native.has(kernel_names.SAMPLING):
                pytest.skip("the log says why there is no kernel")
        yield partial(sampling.sample, implementation=name)


@pytest.fixture(scope="module")
def jitted_sample(implementation):
    return jax.jit(
        lambda *args: implementation(*args)
    )  # a new function per fixture: the instruction set is not part of jit's cache key


@pytest.fixture(autouse=True)
def strict_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


def make_inputs(rows, seeds_R2=None, bans=None, drafted=None, **fields):
    """Inputs with all options off except `fields`, which are scalars or one value per row."""
    fields = {f"{name}_R": value for name, value in fields.items()}
    assert fields.keys() <= OFF.keys()
    arrays = {
        name: np.broadcast_to(np.asarray(fields.get(name, off), dtype), rows)
        for name, (dtype, off) in OFF.items()
    }
    ban_RX = np.full((rows, MAX_BANS), -1, np.int32)
    for row, banned in (bans or {}).items():
        ban_RX[row, -len(banned) :] = banned
    if seeds_R2 is None:
        seeds_R2 = np.random.default_rng(rows).integers(0, 2**32, (rows, 2), np.uint32)
    drafted_RJ = np.full((rows, 1 + DRAFTS), -1, np.int32)
    for row, drafts in (drafted or {}).items():
        drafted_RJ[row, : len(drafts)] = drafts
    array_fields = {"ban_RX": ban_RX, "seeds_R2": seeds_R2, "drafted_RJ": drafted_RJ}
    return SamplingInputs(**jax.tree.map(jnp.asarray, arrays | array_fields))


def empty_slots(slots, V):
    return empty_state(slots, V, 1 + DRAFTS)


def slot_state(*mask_and_counts):
    """State of one slot, whose requested log-probabilities differ from an empty slot's."""
    return sampling.SlotState(*mask_and_counts, jnp.arange(MAX_WANTED) % 7)


def take_rows(inputs, rows):
    return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], inputs)


def sampling_distribution(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """(mask of the tokens that can be sampled, their float64 probabilities)."""
    logits_V = logits_V.astype(np.float64)
    probs_V = special.softmax(logits_V / temperature)
    keep_V = probs_V >= min_p * probs_V.max() * (1 - 1e-6)
    if top_k > 0:
        keep_V &= logits_V >= np.sort(logits_V)[-min(top_k, len(logits_V))]
    remaining_V = np.where(keep_V, probs_V, 0)
    if top_p < 1:
        mass_above_V = np.array([remaining_V[logits_V > logit].sum() for logit in logits_V])
        keep_V &= (mass_above_V < top_p * remaining_V.sum()) | (
            mass_above_V == 0
        )  # the likeliest token always stays
    remaining_V = np.where(keep_V, probs_V, 0)
    return keep_V, remaining_V / remaining_V.sum()


def draw_many(jitted_sample, logits_V, draws, seed=0, chunk=5000, **fields):
    """Sample tokens from one distribution, each with its own seed and position."""
    rng = np.random.default_rng(seed)
    logits_RV = jnp.broadcast_to(jnp.asarray(logits_V), (chunk, len(logits_V)))
    tokens = []
    for _ in range(draws // chunk):
        seeds_R2 = rng.integers(0, 2**32, (chunk, 2), np.uint32)
        inputs = make_inputs(chunk, seeds_R2, positions=rng.integers(0, 9999, chunk), **fields)
        tokens.append(jitted_sample(logits_RV, empty_slots(1, len(logits_V)), inputs).tokens_R)
    return np.concatenate(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.slow
def test_token_frequencies_match_the_float64_distribution(jitted_sample, fields):
    logits_V = np.random.default_rng(1).normal(0, 1.5, 50).astype(np.float32)
    keep_V, probs_V = sampling_distribution(logits_V, **fields)
    counts_V = np.bincount(draw_many(jitted_sample, logits_V, 50_000, **fields), minlength=50)
    assert not counts_V[~keep_V].any()
    expected_V = probs_V * counts_V.sum()
    is_frequent_V = expected_V >= 5
    observed = [*counts_V[is_frequent_V], counts_V[~is_frequent_V].sum()]
    expected = [*expected_V[is_frequent_V], expected_V[~is_frequent_V].sum()]
    if expected[-1] == 0:
        observed = observed[:-1]
        expected = expected[:-1]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize("candidates", [64, 3])
@pytest.mark.slow
def test_sampled_tokens_are_those_kept_by_a_sort(implementation, monkeypatch, candidates):
    """Logits are flat with ties, so that 2,500 samples contain every token that can be sampled.

    With 3 candidates the implementation must bisect.
    """
    monkeypatch.setattr(xla, "CANDIDATES", candidates)
    # a new function: `jitted_sample` was traced with another number of candidates
    draw = jax.jit(lambda *args: implementation(*args))
    rng = np.random.default_rng(candidates)
    V = 20
    draws = 2500
    cases = [
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 1000},
        {"top_p": 1e-30},
        {"top_p": 0.0},
        {"top_p": 0.999999},
        {"min_p": 1.0},
        {"min_p": 1.0, "top_k": 5, "top_p": 0.5},
    ]
    cases += [
        {
            "top_k": int(rng.integers(0, 20)),
            "top_p": float(rng.uniform(0.1, 1)),
            "min_p": float(rng.uniform(0, 0.6)),
        }
        for _ in range(24)
    ]
    for case in cases:
        # 9 values: ties everywhere
        logits_V = rng.choice(rng.normal(0, 0.7, 9), V).astype(np.float32)
        temperature = float(rng.uniform(0.8, 2))
        keep_V, _ = sampling_distribution(logits_V, temperature, **case)
        inputs = make_inputs(draws, temperature=temperature, **case)
        tokens_R = draw(
            jnp.broadcast_to(jnp.asarray(logits_V), (draws, V)), empty_slots(1, V), inputs
        ).tokens_R
        assert np.flatnonzero(keep_V).tolist() == np.unique(tokens_R).tolist(), case


def test_sampled_token_depends_on_seed_and_position_only(jitted_sample):
    logits_V = np.random.default_rng(8).normal(size=V).astype(np.float32)
    seeds_R2 = np.array([[1, 2]] * 4 + [[1, 3], [2, 2], [2, 1], [0, 0]], np.uint32)
    inputs = make_inputs(
        8,
        seeds_R2,
        positions=[5, 5, 5, 6, 5, 5, 5, 5],
        slots=[0, 3, 1, 0, 0, 0, 0, 0],
        temperature=1,
    )
    tokens = jitted_sample(
        jnp.broadcast_to(logits_V, (8, V)), empty_slots(SLOTS, V), inputs
    ).tokens_R.tolist()
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens)) == 6


def test_kernel_uses_the_same_random_generator_as_xla(jitted_sample, implementation):
    """With flat logits the token reveals the random number.

    test_sampling_sums.py compares XLA's with `jax.random`.
    """
    if "native" not in implementation.__module__:
        pytest.skip("it accumulates the probabilities in another order")
    rng = np.random.default_rng(18)
    seeds_R2 = rng.integers(0, 2**32, (32, 2), np.uint32)
    positions_R = rng.integers(0, 2**31, 32)
    inputs = make_inputs(32, seeds_R2, positions=positions_R, temperature=1)
    tokens_R = jitted_sample(jnp.zeros((32, 4096)), empty_slots(1, 4096), inputs).tokens_R
    expected_R = xla.uniform(inputs.seeds_R2, inputs.positions_R) * 4096
    np.testing.assert_array_equal(tokens_R, np.floor(expected_R))


def all_options_case(V=V, rows=32, slots=SLOTS):
    """Rows with different options, which together take every code path."""
    rng = np.random.default_rng(9)
    logits_RV = rng.normal(0, 2, (rows, V)).astype(np.float32)
    logits_RV[::5] = rng.normal(0, 0.2, (len(logits_RV[::5]), V))  # flat: top-p has to bisect
    logits_RV[1, 3], logits_RV[9], logits_RV[17, 0] = np.nan, -np.inf, np.inf
    state = sampling.SlotState(
        bias_BJV=jnp.asarray(rng.normal(size=(slots, 1 + DRAFTS, V)).astype(np.float32)),
        stop_BV=jnp.asarray(rng.random((slots, V)) < 0.1),
        output_counts_BV=jnp.asarray(rng.poisson(0.1, (slots, V)).astype(np.int32)),
        prompt_BV=jnp.asarray(rng.random((slots, V)) < 0.1),
        logprob_token_ids_BL=jnp.asarray(rng.integers(0, V, (slots, MAX_WANTED), np.int32)),
    )

    def random_share(values, off, share=0.5):
        return np.where(rng.random(rows) < share, values, off)

    inputs = make_inputs(
        rows,
        bans={4: [1, 2, 3], 7: [int(np.argmax(logits_RV[7]))]},
        drafted={row: rng.integers(0, V, row % (1 + DRAFTS)).tolist() for row in range(0, rows, 2)},
        slots=rng.integers(0, slots, rows),
        bias_rows=rng.integers(0, 1 + DRAFTS, rows),
        positions=rng.integers(0, 4000, rows),
        temperature=random_share(rng.uniform(0.2, 2, rows), 0, 0.8),
        top_k=random_share(rng.integers(1, 600, rows), 0),
        top_p=random_share(rng.uniform(0.3, 1, rows), 1),
        min_p=random_share(rng.uniform(0, 0.01, rows), 0, 0.3),
        repetition_penalty=random_share(rng.uniform(0.8, 1.5, rows), 1, 0.3),
        presence_penalty=random_share(rng.normal(size=rows), 0, 0.3),
        frequency_penalty=random_share(rng.normal(size=rows), 0, 0.3),
        ban_stop=rng.random(rows) < 0.3,
        biased=rng.random(rows) < 0.3,
        targets=random_share(rng.integers(0, V, rows), -1, 0.1),
        wants_logprobs=rng.random(rows) < 0.5,
    )
    return jnp.asarray(logits_RV), state, inputs


def assert_same_bits(actual, expected):
    for name in actual.__dict__.keys() - {"drafts_BK"}:  # a field that sampling does not fill
        actual_bits, expected_bits = (
            np.asarray(getattr(x, name)).view(np.uint8) for x in (actual, expected)
        )
        np.testing.assert_array_equal(actual_bits, expected_bits, name)


@pytest.mark.parametrize("batch_size", thinned([2, 3, 8, 32], [3, 32]))
@pytest.mark.slow
def test_sampling_is_batch_invariant(jitted_sample, batch_size):
    logits_RV, state, inputs = all_options_case()
    alone = [
        jitted_sample(logits_RV[row : row + 1], state, take_rows(inputs, [row]))
        for row in range(32)
    ]
    order = np.random.default_rng(batch_size).permutation(32)
    for start in range(0, 32 - batch_size + 1, batch_size):
        rows = order[start : start + batch_size]
        together = jitted_sample(logits_RV[rows], state, take_rows(inputs, rows))
        expected = jax.tree.map(
            lambda *leaves: np.concatenate(leaves), *(alone[row] for row in rows)
        )
        assert_same_bits(together, expected)


def test_simple_rows_do_not_depend_on_rows_with_all_options(jitted_sample):
    logits_RV, state, inputs = all_options_case()
    simple_inputs = make_inputs(
        8, temperature=np.linspace(0, 2, 8), wants_logprobs=np.arange(8) % 2
    )
    alone = jitted_sample(logits_RV[:8], state, simple_inputs)
    joint_inputs = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b]), simple_inputs, take_rows(inputs, range(8, 32))
    )
    assert_same_bits(alone, take_rows(jitted_sample(logits_RV, state, joint_inputs), range(8)))


def test_option_values_do_not_recompile(implementation):
    logits_RV, state, inputs = all_options_case()
    traces = []

    @jax.jit
    def counted(logits_RV, state, inputs):
        traces.append(1)
        return implementation(logits_RV, state, inputs)

    for case in (
        inputs,
        make_inputs(32),
        make_inputs(32, temperature=1.0, top_k=5),
        take_rows(inputs, range(31, -1, -1)),
    ):
        counted(logits_RV, state, case)
    assert len(traces) == 1


def test_penalties_and_masks_match_numpy(jitted_sample):
    rng = np.random.default_rng(10)
    R = 8
    logits_RV = rng.normal(0, 3, (R, V)).astype(np.float32)
    _, state, _ = all_options_case()
    state = state.replace(bias_BJV=state.bias_BJV.at[:, :, ::7].set(-jnp.inf))
    bans = {0: [4], 3: [0, V - 1], 5: list(range(MAX_BANS))}
    drafted = {1: [5], 2: [5, 5], 6: [0, V - 1], 7: [int(logits_RV[7].argmax())]}
    values = {
        "slots": rng.integers(0, SLOTS, R),
        "bias_rows": rng.integers(0, 1 + DRAFTS, R),
        "repetition_penalty": rng.uniform(0.5, 2, R),
        "presence_penalty": rng.normal(size=R),
        "frequency_penalty": rng.normal(size=R),
        "biased": np.arange(R) % 2 == 0,
        "ban_stop": np.arange(R) % 3 == 0,
    }
    inputs = make_inputs(R, bans=bans, drafted=drafted, **values)
    adjusted_RV = xla.penalise(xla.mask(jnp.asarray(logits_RV), state, inputs), state, inputs)
    bias_BJV, stop_BV, counts_BV, prompt_BV, _ = (
        np.asarray(leaf) for leaf in jax.tree.leaves(state)
    )
    expected_RV = logits_RV.astype(np.float64)
    for r, (slot, bias_row) in enumerate(zip(values["slots"], values["bias_rows"], strict=True)):
        for token in range(V):
            x = expected_RV[r, token] + (
                bias_BJV[slot, bias_row, token] if values["biased"][r] else 0
            )
            if (values["ban_stop"][r] and stop_BV[slot, token]) or token in bans.get(r, []):
                x = -np.inf
            count = counts_BV[slot, token] + drafted.get(r, []).count(token)
            if count or prompt_BV[slot, token]:
                x = (
                    x / values["repetition_penalty"][r]
                    if x > 0
                    else x * values["repetition_penalty"][r]
                )
            expected_RV[r, token] = (
                x
                - values["frequency_penalty"][r] * count
                - values["presence_penalty"][r] * (count > 0)
            )
    np.testing.assert_allclose(adjusted_RV, expected_RV, rtol=1e-5, atol=1e-5)
    tokens_R = jitted_sample(logits_RV, state, inputs).tokens_R
    np.testing.assert_array_equal(tokens_R, expected_RV.argmax(1))


def test_greedy_sampling_takes_the_first_of_ties(jitted_sample):
    logits_RV = np.zeros((8, V), np.float32)
    logits_RV[0, [699, 610, 77]] = logits_RV[1, [64, 75]] = logits_RV[2, [699]] = 1
    assert jitted_sample(logits_RV, empty_slots(SLOTS, V), make_inputs(8)).tokens_R.tolist() == [
        77,
        64,
        699,
        0,
        0,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-30, 1e-6])
def test_tiny_temperature_is_greedy(jitted_sample, temperature):
    logits_RV = np.random.default_rng(11).normal(0, 50, (32, V)).astype(np.float32)
    inputs = make_inputs(32, temperature=temperature, top_p=0.9, min_p=0.1, top_k=10)
    tokens_R = jitted_sample(logits_RV, empty_slots(SLOTS, V), inputs).tokens_R
    np.testing.assert_array_equal(tokens_R, logits_RV.argmax(1))


@pytest.mark.parametrize("V", [5, V])
def test_logprobs_and_ranks_are_of_the_raw_logits(jitted_sample, V):
    rng = np.random.default_rng(12)
    R = 8
    K = min(V, MAX_LOGPROBS)
    logits_RV = rng.normal(0, 4, (R, V)).astype(np.float32)
    logits_RV[0] = np.round(logits_RV[0])  # ties
    logits_RV[1, 1:] = -np.inf
    targets_R = np.where(np.arange(R) < 5, rng.integers(0, V, R), -1)
    is_requested_R = np.arange(R) != 7
    state = empty_slots(SLOTS, V)
    state = state.replace(
        bias_BJV=jnp.asarray(rng.normal(size=state.bias_BJV.shape).astype(np.float32)),
        logprob_token_ids_BL=jnp.asarray(
            rng.integers(0, V, state.logprob_token_ids_BL.shape, np.int32)
        ),
    )
    inputs = make_inputs(
        R,
        slots=np.arange(R) % SLOTS,
        temperature=0.5,
        top_k=3,
        biased=True,
        targets=targets_R,
        wants_logprobs=is_requested_R,
        bans={2: [0, 1, 2]},
    )
    out = jax.tree.map(np.asarray, jitted_sample(logits_RV, state, inputs))
    assert out.ok_R.all() and out.top_ids_RK.shape == out.top_logprobs_RK.shape == (R, K)
    np.testing.assert_array_equal(out.tokens_R[:5], targets_R[:5])
    exact_RV = special.log_softmax(logits_RV.astype(np.float64), axis=1)
    for r, token in enumerate(out.tokens_R):
        if not is_requested_R[r]:
            assert out.logprobs_R[r] == out.ranks_R[r] == 0 and not out.top_ids_RK[r].any()
            assert not out.token_id_logprobs_RL[r].any()
            continue
        np.testing.assert_allclose(out.logprobs_R[r], exact_RV[r, token], rtol=1e-5, atol=1e-5)
        assert out.ranks_R[r] == 1 + (logits_RV[r] > logits_RV[r, token]).sum()
        best_K = np.argsort(-logits_RV[r], kind="stable")[:K]
        np.testing.assert_array_equal(out.top_ids_RK[r], best_K)
        np.testing.assert_allclose(
            out.top_logprobs_RK[r], exact_RV[r, best_K], rtol=1e-5, atol=1e-5
        )
        requested_ids_L = np.asarray(state.logprob_token_ids_BL)[r % SLOTS]
        np.testing.assert_allclose(
            out.token_id_logprobs_RL[r], exact_RV[r, requested_ids_L], rtol=1e-5, atol=1e-5
        )
        reported_logprobs = dict(zip(best_K.tolist(), out.top_logprobs_RK[r], strict=True)) | {
            int(token): out.logprobs_R[r]
        }
        for requested_id, value in zip(
            requested_ids_L.tolist(), out.token_id_logprobs_RL[r], strict=True
        ):
            assert (
                reported_logprobs.get(requested_id, value) == value
            )  # the same bits wherever a token is reported


def test_plain_sampling_gives_the_same_tokens(implementation):
    """Without logprobs and masks, `plain` may omit the fields that nothing requests.

    Some rows are not finite.
    """
    rng = np.random.default_rng(17)
    logits_RV = rng.normal(0, 3, (32, V)).astype(np.float32)
    logits_RV[3, 5], logits_RV[4] = np.nan, -np.inf
    inputs = make_inputs(
        32,
        temperature=np.where(np.arange(32) % 3, rng.uniform(0.3, 2, 32), 0),
        min_p=rng.choice([0, 0.05], 32),
    )
    state = empty_slots(SLOTS, V)
    full, plain_outputs = (
        jax.jit(lambda *args, is_plain=is_plain: implementation(*args, is_plain))(
            logits_RV, state, inputs
        )
        for is_plain in (False, True)
    )
    unrequested = {
        name: value for name, value in vars(full).items() if name not in ("tokens_R", "ok_R")
    }
    assert not any(np.any(value) for value in unrequested.values())
    omitted = {
        name: unrequested[name] for name, value in vars(plain_outputs).items() if value is None
    }
    assert_same_bits(full, plain_outputs.replace(**omitted))


@pytest.mark.parametrize("V", thinned([700, 9000], [700]))
@pytest.mark.slow
def test_branchless_sampling_matches_xla(monkeypatch, V):
    """With 9,000 tokens the top-k search runs in groups; with 700 the logits tie."""
    monkeypatch.setattr(branchless, "on_gpu", lambda: True)
    logits_RV, state, inputs = all_options_case(V)
    if V == 700:
        logits_RV = jnp.round(logits_RV * 2) / 2
    sample = partial(
        jax.jit(sampling.sample, static_argnames="implementation"), logits_RV, state, inputs
    )
    outputs = sample(implementation="branchless")
    assert_same_bits(outputs, sample(implementation="xla"))
    assert len(np.unique(outputs.tokens_R)) > 10


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_row_extremes_match_numpy(monkeypatch, backend):
    """Both implementations of `extreme`; either runs on any backend."""
    rng = np.random.default_rng(0)
    values_RV = rng.normal(size=(5, V)).astype(np.float32)
    values_RV[0], values_RV[1, 3], values_RV[2, -1] = -np.inf, np.inf, 9
    index_RV = rng.integers(-9, V, (5, V)).astype(np.int32)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert np.array_equal(
        xla.row_extreme(jnp.asarray(values_RV), jax.lax.max, -jnp.inf), values_RV.max(axis=1)
    )
    assert np.array_equal(
        xla.row_extreme(jnp.asarray(index_RV), jax.lax.min, V), index_RV.min(axis=1)
    )
    if backend == "cpu":  # the CPU's own reduction may lose a NaN
        values_RV[3, 100] = np.nan
        largest_R = xla.row_extreme(jnp.asarray(values_RV), jax.lax.max, -jnp.inf)
        assert np.flatnonzero(np.isnan(largest_R)).tolist() == [3]


@pytest.mark.parametrize("is_plain", [False, True])
def test_branchless_sampling_has_no_sorts_or_control_flow(monkeypatch, is_plain):
    monkeypatch.setattr(branchless, "on_gpu", lambda: True)
    _, state, inputs = all_options_case()
    logits_RV = jax.ShapeDtypeStruct((32, V), jnp.float32)
    sample = partial(sampling.sample, temperature_only=is_plain, implementation="branchless")
    used_primitives = primitives(jax.make_jaxpr(sample)(logits_RV, state, inputs).jaxpr)
    assert (
        not used_primitives & {"sort", "top_k", "cond", "while", "scan"}
        and "exp" in used_primitives
    )
    output_shapes = jax.eval_shape(sample, logits_RV, state, inputs)
    scores = (
        output_shapes.logprobs_R,
        output_shapes.ranks_R,
        output_shapes.top_ids_RK,
        output_shapes.top_logprobs_RK,
        output_shapes.token_id_logprobs_RL,
    )
    assert all((score is None) == is_plain for score in scores), (
        "fields that nothing requests cost a launch"
    )
    used_primitives = primitives(
        jax.make_jaxpr(partial(sample, implementation="xla"))(logits_RV, state, inputs).jaxpr
    )
    assert is_plain or {"top_k", "cond", "while"} <= used_primitives


def primitives(jaxpr) -> set[str]:
    """The names of all primitives of a jaxpr and of its nested jaxprs."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    return names.union(*map(primitives, core.subjaxprs(jaxpr)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_row_does_not_affect_other_rows(jitted_sample, temperature):
    logits_RV = np.random.default_rng(13).normal(size=(8, V)).astype(np.float32)
    fields = {"temperature": temperature, "top_p": 0.9, "top_k": 100, "wants_logprobs": True}
    state = empty_slots(SLOTS, V)
    # a copy, since the dispatched step may read the array later
    healthy = jitted_sample(logits_RV.copy(), state, make_inputs(8, **fields))
    logits_RV[1, 150], logits_RV[2], logits_RV[4, 0] = np.nan, -np.inf, np.inf
    broken = jitted_sample(
        logits_RV, state, make_inputs(8, **fields, bans={1: [150]})
    )  # a ban hides no NaN
    assert healthy.ok_R.all() and broken.ok_R.tolist() == [
        True,
        False,
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    good_rows = [0, 3, 5, 6, 7]
    bad_rows = [1, 2, 4]
    assert_same_bits(take_rows(healthy, good_rows), take_rows(broken, good_rows))
    assert (np.asarray(broken.tokens_R)[bad_rows] == BROKEN).all()
    assert not any(
        np.asarray(leaf)[bad_rows].any() for leaf in jax.tree.leaves(replace(broken, tokens_R=None))
    )


def test_every_nan_is_detected(jitted_sample):
    rng = np.random.default_rng(16)
    for rows in (1, 8, 32):
        for _ in range(12):
            logits_RV = rng.normal(size=(rows, V)).astype(np.float32)
            logits_RV[np.arange(rows), rng.integers(0, V, rows)] = np.nan
            out = jitted_sample(logits_RV, empty_slots(SLOTS, V), make_inputs(rows))
            assert not out.ok_R.any() and (np.asarray(out.tokens_R) == BROKEN).all()


def test_a_row_with_every_token_banned_is_not_ok(jitted_sample):
    only_V = np.arange(V) == 3
    row = slot_state(
        jnp.where(only_V, 0, -jnp.inf), only_V, np.zeros(V, np.int32), np.zeros(V, bool)
    )
    state = replace_row(empty_slots(SLOTS, V), 1, row)
    inputs = make_inputs(
        8,
        slots=1,
        biased=True,
        ban_stop=[False] + [True] * 7,
        temperature=np.arange(8) % 2,
        targets=[-1] * 7 + [5],
    )
    out = jitted_sample(jnp.zeros((8, V)), state, inputs)
    assert out.ok_R.tolist() == [True] + [False] * 6 + [True]
    assert out.tokens_R.tolist() == [3] + [BANNED] * 6 + [5]


def test_half_precision_logits_are_read_exactly(jitted_sample):
    _, state, inputs = all_options_case()
    logits_RV = jnp.asarray(np.random.default_rng(14).normal(size=(32, V)), jnp.bfloat16)
    assert_same_bits(
        jitted_sample(logits_RV, state, inputs),
        jitted_sample(logits_RV.astype(jnp.float32), state, inputs),
    )


def test_tokens_of_tracked_rows_are_counted():
    rng = np.random.default_rng(15)
    B = 3
    V = 11
    T = 200
    slots_T = rng.integers(0, B, T)
    tokens_T = rng.integers(0, V, T)
    is_prompt_T = rng.random(T) < 0.1
    tracked_T = rng.random(T) < 0.3
    slots_T[~tracked_T] = rng.integers(-2, 9, (~tracked_T).sum())  # padding may point anywhere
    state = jax.jit(count_tokens, donate_argnums=0)(
        empty_state(B, V), slots_T, tokens_T, is_prompt_T, tracked_T
    )
    prompt_BV = np.zeros((B, V), bool)
    counts_BV = np.zeros((B, V), int)
    for slot, token, is_prompt in zip(
        slots_T[tracked_T], tokens_T[tracked_T], is_prompt_T[tracked_T], strict=True
    ):
        if is_prompt:
            prompt_BV[slot, token] = True
        else:
            counts_BV[slot, token] += 1
    np.testing.assert_array_equal(state.prompt_BV, prompt_BV)
    np.testing.assert_array_equal(state.output_counts_BV, counts_BV)


def test_new_request_replaces_only_its_own_slot():
    _, state, _ = all_options_case(20, 18, 3)
    old_state = jax.tree.map(np.asarray, state)
    row = slot_state(jnp.arange(20.0), jnp.arange(20) == 4, jnp.arange(20) % 3, jnp.arange(20) > 7)
    new_state = jax.jit(replace_row, donate_argnums=0)(state, 1, row)
    for leaf, old, new in zip(*map(jax.tree.leaves, (new_state, old_state, row)), strict=True):
        # bias rows of draft positions are written before they are read
        if leaf is new_state.bias_BJV:
            leaf = leaf[:, 0]
            old = old[:, 0]
        np.testing.assert_array_equal(leaf[1], np.broadcast_to(new, leaf.shape[-1]))
        np.testing.assert_array_equal(leaf[np.array([0, 2])], old[[0, 2]])


def test_drafts_are_accepted_up_to_the_first_mismatch():
    """Random drafts against a naive loop: the accepted drafts, and the row of the next token."""
    rng = np.random.default_rng(17)
    for _ in range(50):
        sampled_ids = []
        drafts = []
        depths = []
        ok = []
        expected = []
        last = []
        while len(sampled_ids) < 16:  # always 16 rows, to compile once
            count = int(rng.integers(0, min(1 + DRAFTS, 16 - len(sampled_ids))))
            is_accepted = True
            for depth in range(count + 1):
                draft = int(rng.integers(0, 3)) if depth < count else -1
                token = int(rng.integers(0, 3))
                is_ok = bool(rng.random() < 0.9)
                was_accepted = is_accepted
                is_accepted = is_accepted and is_ok and token == draft
                row = (
                    token if is_ok else 0,
                    draft,
                    depth,
                    is_ok,
                    is_accepted,
                    was_accepted and not is_accepted,
                )
                for column, value in zip(
                    (sampled_ids, drafts, depths, ok, expected, last), row, strict=True
                ):
                    column.append(value)
        R = len(sampled_ids)
        empty = jnp.zeros((R, 1))
        sampled = sampling.Sampled(jnp.array(sampled_ids), *[empty] * 5, jnp.array(ok))
        accepted_R = sampling.accepted_drafts(sampled, jnp.array(drafts), jnp.array(depths))
        assert accepted_R.tolist() == expected
        assert sampling.samples_next_token(accepted_R, jnp.array(depths)).tolist() == last
