"""Each implementation of sampling against float64 references written with a plain sort, exact
counts, and itself in other company."""

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
SLOTS = 8  # and 8 or 32 rows, where a test has no reason for others: each shape is a compilation
V = 700
DRAFTS = 2


@pytest.fixture(scope="module", params=thinned(SAMPLERS, SAMPLERS[:2]))
def implementation(request):
    """An implementation's `sample`: XLA's, and the kernel's on every instruction set that this
    machine has.
    """
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
def run(implementation):
    return jax.jit(
        lambda *args: implementation(*args)
    )  # a function of its own: the instruction set is no part of a key


@pytest.fixture(autouse=True)
def strict_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


def make_inputs(rows, seeds_R2=None, bans=None, drafted=None, **fields):
    """Inputs of some rows with everything off but the fields given, each a number or one number
    a row.
    """
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
    others = {"ban_RX": ban_RX, "seeds_R2": seeds_R2, "drafted_RJ": drafted_RJ}
    return SamplingInputs(**jax.tree.map(jnp.asarray, arrays | others))


def empty(slots, V):
    return empty_state(slots, V, 1 + DRAFTS)


def row_of(*of_words):
    """A slot's row, and other tokens whose log-probabilities are wanted than those of an empty
    one.
    """
    return sampling.SlotState(*of_words, jnp.arange(MAX_WANTED) % 7)


def take(inputs, rows):
    return jax.tree.map(lambda leaf: leaf[np.asarray(rows)], inputs)


def kept(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens may be drawn, and their float64 probabilities."""
    logits_V = logits_V.astype(np.float64)
    probs_V = special.softmax(logits_V / temperature)
    keep_V = probs_V >= min_p * probs_V.max() * (1 - 1e-6)
    if top_k > 0:
        keep_V &= logits_V >= np.sort(logits_V)[-min(top_k, len(logits_V))]
    left_V = np.where(keep_V, probs_V, 0)
    if top_p < 1:
        above_V = np.array([left_V[logits_V > logit].sum() for logit in logits_V])
        keep_V &= (above_V < top_p * left_V.sum()) | (above_V == 0)  # the best one always stays
    left_V = np.where(keep_V, probs_V, 0)
    return keep_V, left_V / left_V.sum()


def draw_many(run, logits_V, draws, seed=0, chunk=5000, **fields):
    """Tokens drawn from one distribution, each with a seed and position of its own."""
    rng = np.random.default_rng(seed)
    logits_RV = jnp.broadcast_to(jnp.asarray(logits_V), (chunk, len(logits_V)))
    tokens = []
    for _ in range(draws // chunk):
        seeds_R2 = rng.integers(0, 2**32, (chunk, 2), np.uint32)
        inputs = make_inputs(chunk, seeds_R2, positions=rng.integers(0, 9999, chunk), **fields)
        tokens.append(run(logits_RV, empty(1, len(logits_V)), inputs).tokens_R)
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
def test_frequencies_follow_the_exact_distribution(run, fields):
    logits_V = np.random.default_rng(1).normal(0, 1.5, 50).astype(np.float32)
    keep_V, probs_V = kept(logits_V, **fields)
    counts_V = np.bincount(draw_many(run, logits_V, 50_000, **fields), minlength=50)
    assert not counts_V[~keep_V].any()
    expected_V = probs_V * counts_V.sum()
    often_V = expected_V >= 5
    observed = [*counts_V[often_V], counts_V[~often_V].sum()]
    expected = [*expected_V[often_V], expected_V[~often_V].sum()]
    if expected[-1] == 0:
        observed = observed[:-1]
        expected = expected[:-1]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize("candidates", [64, 3])
@pytest.mark.slow
def test_what_can_be_drawn_is_what_a_sort_keeps(implementation, monkeypatch, candidates):
    """Flat logits with ties, each kept token likely enough to turn up in 2,500 draws; 3 candidates
    force bisection.
    """
    monkeypatch.setattr(xla, "CANDIDATES", candidates)
    # a function of its own: `run` remembers other candidates
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
        keep_V, _ = kept(logits_V, temperature, **case)
        inputs = make_inputs(draws, temperature=temperature, **case)
        tokens_R = draw(
            jnp.broadcast_to(jnp.asarray(logits_V), (draws, V)), empty(1, V), inputs
        ).tokens_R
        assert np.flatnonzero(keep_V).tolist() == np.unique(tokens_R).tolist(), case


def test_a_draw_depends_on_seed_and_position_only(run):
    logits_V = np.random.default_rng(8).normal(size=V).astype(np.float32)
    seeds_R2 = np.array([[1, 2]] * 4 + [[1, 3], [2, 2], [2, 1], [0, 0]], np.uint32)
    inputs = make_inputs(
        8,
        seeds_R2,
        positions=[5, 5, 5, 6, 5, 5, 5, 5],
        slots=[0, 3, 1, 0, 0, 0, 0, 0],
        temperature=1,
    )
    tokens = run(jnp.broadcast_to(logits_V, (8, V)), empty(SLOTS, V), inputs).tokens_R.tolist()
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens)) == 6


def test_the_kernel_draws_by_the_same_generator(run, implementation):
    """Flat logits show the number that was drawn: XLA's is compared with `jax.random` in
    test_sampling_sums.py.
    """
    if "native" not in implementation.__module__:
        pytest.skip("its draws run over the tokens in another order")
    rng = np.random.default_rng(18)
    seeds_R2 = rng.integers(0, 2**32, (32, 2), np.uint32)
    positions_R = rng.integers(0, 2**31, 32)
    inputs = make_inputs(32, seeds_R2, positions=positions_R, temperature=1)
    tokens_R = run(jnp.zeros((32, 4096)), empty(1, 4096), inputs).tokens_R
    expected_R = xla.uniform(inputs.seeds_R2, inputs.positions_R) * 4096
    np.testing.assert_array_equal(tokens_R, np.floor(expected_R))


def mixed_case(V=V, rows=32, slots=SLOTS):
    """Rows that differ in everything, so that every path is taken for the sake of some of them."""
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

    def some(values, off, share=0.5):
        return np.where(rng.random(rows) < share, values, off)

    inputs = make_inputs(
        rows,
        bans={4: [1, 2, 3], 7: [int(np.argmax(logits_RV[7]))]},
        drafted={row: rng.integers(0, V, row % (1 + DRAFTS)).tolist() for row in range(0, rows, 2)},
        slots=rng.integers(0, slots, rows),
        bias_rows=rng.integers(0, 1 + DRAFTS, rows),
        positions=rng.integers(0, 4000, rows),
        temperature=some(rng.uniform(0.2, 2, rows), 0, 0.8),
        top_k=some(rng.integers(1, 600, rows), 0),
        top_p=some(rng.uniform(0.3, 1, rows), 1),
        min_p=some(rng.uniform(0, 0.01, rows), 0, 0.3),
        repetition_penalty=some(rng.uniform(0.8, 1.5, rows), 1, 0.3),
        presence_penalty=some(rng.normal(size=rows), 0, 0.3),
        frequency_penalty=some(rng.normal(size=rows), 0, 0.3),
        ban_stop=rng.random(rows) < 0.3,
        biased=rng.random(rows) < 0.3,
        targets=some(rng.integers(0, V, rows), -1, 0.1),
        wants_logprobs=rng.random(rows) < 0.5,
    )
    return jnp.asarray(logits_RV), state, inputs


def assert_same_bits(ours, theirs):
    for name in ours.__dict__.keys() - {"drafts_BK"}:  # which sampling does not make
        ours_bits, theirs_bits = (
            np.asarray(getattr(x, name)).view(np.uint8) for x in (ours, theirs)
        )
        np.testing.assert_array_equal(ours_bits, theirs_bits, name)


@pytest.mark.parametrize("company", thinned([2, 3, 8, 32], [3, 32]))
@pytest.mark.slow
def test_a_row_alone_gives_the_same_bits_as_in_company(run, company):
    logits_RV, state, inputs = mixed_case()
    alone = [run(logits_RV[row : row + 1], state, take(inputs, [row])) for row in range(32)]
    order = np.random.default_rng(company).permutation(32)
    for start in range(0, 32 - company + 1, company):
        rows = order[start : start + company]
        together = run(logits_RV[rows], state, take(inputs, rows))
        expected = jax.tree.map(
            lambda *leaves: np.concatenate(leaves), *(alone[row] for row in rows)
        )
        assert_same_bits(together, expected)


def test_plain_rows_keep_their_bits_beside_rows_that_want_everything(run):
    logits_RV, state, inputs = mixed_case()
    plain = make_inputs(8, temperature=np.linspace(0, 2, 8), wants_logprobs=np.arange(8) % 2)
    alone = run(logits_RV[:8], state, plain)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), plain, take(inputs, range(8, 32)))
    assert_same_bits(alone, take(run(logits_RV, state, both), range(8)))


def test_values_never_recompile(implementation):
    logits_RV, state, inputs = mixed_case()
    traces = []

    @jax.jit
    def counted(logits_RV, state, inputs):
        traces.append(1)
        return implementation(logits_RV, state, inputs)

    for case in (
        inputs,
        make_inputs(32),
        make_inputs(32, temperature=1.0, top_k=5),
        take(inputs, range(31, -1, -1)),
    ):
        counted(logits_RV, state, case)
    assert len(traces) == 1


def test_penalties_and_masks_match_numpy(run):
    rng = np.random.default_rng(10)
    R = 8
    logits_RV = rng.normal(0, 3, (R, V)).astype(np.float32)
    _, state, _ = mixed_case()
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
    tokens_R = run(logits_RV, state, inputs).tokens_R
    np.testing.assert_array_equal(tokens_R, expected_RV.argmax(1))


def test_greedy_takes_the_first_of_equals(run):
    logits_RV = np.zeros((8, V), np.float32)
    logits_RV[0, [699, 610, 77]] = logits_RV[1, [64, 75]] = logits_RV[2, [699]] = 1
    assert run(logits_RV, empty(SLOTS, V), make_inputs(8)).tokens_R.tolist() == [
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
def test_a_vanishing_temperature_is_greedy(run, temperature):
    logits_RV = np.random.default_rng(11).normal(0, 50, (32, V)).astype(np.float32)
    inputs = make_inputs(32, temperature=temperature, top_p=0.9, min_p=0.1, top_k=10)
    tokens_R = run(logits_RV, empty(SLOTS, V), inputs).tokens_R
    np.testing.assert_array_equal(tokens_R, logits_RV.argmax(1))


@pytest.mark.parametrize("V", [5, V])
def test_logprobs_and_ranks_are_of_the_raw_logits(run, V):
    rng = np.random.default_rng(12)
    R = 8
    K = min(V, MAX_LOGPROBS)
    logits_RV = rng.normal(0, 4, (R, V)).astype(np.float32)
    logits_RV[0] = np.round(logits_RV[0])  # ties
    logits_RV[1, 1:] = -np.inf
    targets_R = np.where(np.arange(R) < 5, rng.integers(0, V, R), -1)
    wants_R = np.arange(R) != 7
    state = empty(SLOTS, V)
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
        wants_logprobs=wants_R,
        bans={2: [0, 1, 2]},
    )
    out = jax.tree.map(np.asarray, run(logits_RV, state, inputs))
    assert out.ok_R.all() and out.top_ids_RK.shape == out.top_logprobs_RK.shape == (R, K)
    np.testing.assert_array_equal(out.tokens_R[:5], targets_R[:5])
    exact_RV = special.log_softmax(logits_RV.astype(np.float64), axis=1)
    for r, token in enumerate(out.tokens_R):
        if not wants_R[r]:
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
        wanted_L = np.asarray(state.logprob_token_ids_BL)[r % SLOTS]
        np.testing.assert_allclose(
            out.token_id_logprobs_RL[r], exact_RV[r, wanted_L], rtol=1e-5, atol=1e-5
        )
        known = dict(zip(best_K.tolist(), out.top_logprobs_RK[r], strict=True)) | {
            int(token): out.logprobs_R[r]
        }
        for other, value in zip(wanted_L.tolist(), out.token_id_logprobs_RL[r], strict=True):
            assert known.get(other, value) == value  # the same bits wherever a token is told


def test_without_branches_it_draws_the_same(implementation):
    """Rows for which nothing is skipped, some of them broken.

    What nobody asked for may be left out.
    """
    rng = np.random.default_rng(17)
    logits_RV = rng.normal(0, 3, (32, V)).astype(np.float32)
    logits_RV[3, 5], logits_RV[4] = np.nan, -np.inf
    inputs = make_inputs(
        32,
        temperature=np.where(np.arange(32) % 3, rng.uniform(0.3, 2, 32), 0),
        min_p=rng.choice([0, 0.05], 32),
    )
    state = empty(SLOTS, V)
    one, other = (
        jax.jit(lambda *args, plain=plain: implementation(*args, plain))(logits_RV, state, inputs)
        for plain in (False, True)
    )
    unasked = {name: value for name, value in vars(one).items() if name not in ("tokens_R", "ok_R")}
    assert not any(np.any(value) for value in unasked.values())
    left_out = {name: unasked[name] for name, value in vars(other).items() if value is None}
    assert_same_bits(one, other.replace(**left_out))


@pytest.mark.parametrize("V", thinned([700, 9000], [700]))
@pytest.mark.slow
def test_without_branches_and_sorts_the_tokens_are_xlas(monkeypatch, V):
    """The same draws and scores; of 9,000 tokens the best are found by groups, and with 700 of them
    everything ties.
    """
    monkeypatch.setattr(branchless, "on_gpu", lambda: True)
    logits_RV, state, inputs = mixed_case(V)
    if V == 700:
        logits_RV = jnp.round(logits_RV * 2) / 2
    run = partial(
        jax.jit(sampling.sample, static_argnames="implementation"), logits_RV, state, inputs
    )
    ours = run(implementation="branchless")
    assert_same_bits(ours, run(implementation="xla"))
    assert len(np.unique(ours.tokens_R)) > 10


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_extremes_of_rows(monkeypatch, backend):
    """By both ways, either of which works anywhere."""
    rng = np.random.default_rng(0)
    values_RV = rng.normal(size=(5, V)).astype(np.float32)
    values_RV[0], values_RV[1, 3], values_RV[2, -1] = -np.inf, np.inf, 9
    at_RV = rng.integers(-9, V, (5, V)).astype(np.int32)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert np.array_equal(
        xla.row_extreme(jnp.asarray(values_RV), jax.lax.max, -jnp.inf), values_RV.max(axis=1)
    )
    assert np.array_equal(xla.row_extreme(jnp.asarray(at_RV), jax.lax.min, V), at_RV.min(axis=1))
    if backend == "cpu":  # whose reduction may lose it
        values_RV[3, 100] = np.nan
        largest_R = xla.row_extreme(jnp.asarray(values_RV), jax.lax.max, -jnp.inf)
        assert np.flatnonzero(np.isnan(largest_R)).tolist() == [3]


@pytest.mark.parametrize("plain", [False, True])
def test_nothing_waits_for_the_host_on_a_gpu(monkeypatch, plain):
    monkeypatch.setattr(branchless, "on_gpu", lambda: True)
    _, state, inputs = mixed_case()
    logits_RV = jax.ShapeDtypeStruct((32, V), jnp.float32)
    run = partial(sampling.sample, temperature_only=plain, implementation="branchless")
    used = primitives(jax.make_jaxpr(run)(logits_RV, state, inputs).jaxpr)
    assert not used & {"sort", "top_k", "cond", "while", "scan"} and "exp" in used
    like = jax.eval_shape(run, logits_RV, state, inputs)
    scores = (
        like.logprobs_R,
        like.ranks_R,
        like.top_ids_RK,
        like.top_logprobs_RK,
        like.token_id_logprobs_RL,
    )
    assert all((each is None) == plain for each in scores), (
        "a launch writes the zeros that nobody reads"
    )
    used = primitives(
        jax.make_jaxpr(partial(run, implementation="xla"))(logits_RV, state, inputs).jaxpr
    )
    assert plain or {"top_k", "cond", "while"} <= used


def primitives(jaxpr) -> set[str]:
    """The names of all operations, those of functions within it too."""
    found = {equation.primitive.name for equation in jaxpr.eqns}
    return found.union(*map(primitives, core.subjaxprs(jaxpr)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_fail_alone(run, temperature):
    logits_RV = np.random.default_rng(13).normal(size=(8, V)).astype(np.float32)
    fields = {"temperature": temperature, "top_p": 0.9, "top_k": 100, "wants_logprobs": True}
    state = empty(SLOTS, V)
    # a step reads its arrays when it runs
    healthy = run(logits_RV.copy(), state, make_inputs(8, **fields))
    logits_RV[1, 150], logits_RV[2], logits_RV[4, 0] = np.nan, -np.inf, np.inf
    broken = run(logits_RV, state, make_inputs(8, **fields, bans={1: [150]}))  # a ban hides no NaN
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
    good = [0, 3, 5, 6, 7]
    bad = [1, 2, 4]
    assert_same_bits(take(healthy, good), take(broken, good))
    assert (np.asarray(broken.tokens_R)[bad] == BROKEN).all()
    assert not any(
        np.asarray(leaf)[bad].any() for leaf in jax.tree.leaves(replace(broken, tokens_R=None))
    )


def test_no_nan_is_overlooked(run):
    rng = np.random.default_rng(16)
    for rows in (1, 8, 32):
        for _ in range(12):
            logits_RV = rng.normal(size=(rows, V)).astype(np.float32)
            logits_RV[np.arange(rows), rng.integers(0, V, rows)] = np.nan
            out = run(logits_RV, empty(SLOTS, V), make_inputs(rows))
            assert not out.ok_R.any() and (np.asarray(out.tokens_R) == BROKEN).all()


def test_a_row_with_every_token_banned_is_not_ok(run):
    only_V = np.arange(V) == 3
    row = row_of(jnp.where(only_V, 0, -jnp.inf), only_V, np.zeros(V, np.int32), np.zeros(V, bool))
    state = replace_row(empty(SLOTS, V), 1, row)
    inputs = make_inputs(
        8,
        slots=1,
        biased=True,
        ban_stop=[False] + [True] * 7,
        temperature=np.arange(8) % 2,
        targets=[-1] * 7 + [5],
    )
    out = run(jnp.zeros((8, V)), state, inputs)
    assert out.ok_R.tolist() == [True] + [False] * 6 + [True]
    assert out.tokens_R.tolist() == [3] + [BANNED] * 6 + [5]


def test_half_precision_logits_are_read_exactly(run):
    _, state, inputs = mixed_case()
    logits_RV = jnp.asarray(np.random.default_rng(14).normal(size=(32, V)), jnp.bfloat16)
    assert_same_bits(
        run(logits_RV, state, inputs), run(logits_RV.astype(jnp.float32), state, inputs)
    )


def test_tokens_are_counted_where_tracked():
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


def test_a_new_request_finds_its_slot_clean_and_the_others_as_they_were():
    _, state, _ = mixed_case(20, 18, 3)
    before = jax.tree.map(np.asarray, state)
    row = row_of(jnp.arange(20.0), jnp.arange(20) == 4, jnp.arange(20) % 3, jnp.arange(20) > 7)
    after = jax.jit(replace_row, donate_argnums=0)(state, 1, row)
    for leaf, old, new in zip(*map(jax.tree.leaves, (after, before, row)), strict=True):
        # those of rows with drafts before them are written before they are read
        if leaf is after.bias_BJV:
            leaf = leaf[:, 0]
            old = old[:, 0]
        np.testing.assert_array_equal(leaf[1], np.broadcast_to(new, leaf.shape[-1]))
        np.testing.assert_array_equal(leaf[np.array([0, 2])], old[[0, 2]])


def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn():
    """Random sequences of rows beside a naive loop: which drafts, and which row draws the next
    token.
    """
    rng = np.random.default_rng(17)
    for _ in range(50):
        drawn = []
        drafts = []
        depths = []
        ok = []
        expected = []
        last = []
        while len(drawn) < 16:  # so that it is compiled once
            count = int(rng.integers(0, min(1 + DRAFTS, 16 - len(drawn))))
            going = True
            for depth in range(count + 1):
                draft = int(rng.integers(0, 3)) if depth < count else -1
                token = int(rng.integers(0, 3))
                fine = bool(rng.random() < 0.9)
                reached = going
                going = going and fine and token == draft
                row = token if fine else 0, draft, depth, fine, going, reached and not going
                for column, value in zip(
                    (drawn, drafts, depths, ok, expected, last), row, strict=True
                ):
                    column.append(value)
        R = len(drawn)
        nothing = jnp.zeros((R, 1))
        sampled = sampling.Sampled(jnp.array(drawn), *[nothing] * 5, jnp.array(ok))
        accepted_R = sampling.accepted_drafts(sampled, jnp.array(drafts), jnp.array(depths))
        assert accepted_R.tolist() == expected
        assert sampling.samples_next_token(accepted_R, jnp.array(depths)).tolist() == last
