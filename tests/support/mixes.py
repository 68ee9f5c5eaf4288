"""Random requests with all kinds of parameters, and every field of their answers for comparison."""

import random

from quire.serving.api.params import SamplingParams
from quire.serving.engine.engine import Engine


def bits(request) -> list[tuple]:
    """Tokens, finish and stop reasons, text and log-probabilities of each answer."""
    output = request.output()
    scores = [
        sorted((token, logprob.logprob) for token, logprob in entry.items())
        for entry in (output.prompt_logprobs or [])[1:]
        if entry
    ]
    return [
        (
            list(answer.token_ids),
            answer.finish_reason,
            answer.stop_reason,
            answer.text,
            [
                sorted((token, logprob.logprob, logprob.rank) for token, logprob in entry.items())
                for entry in answer.logprobs or ()
            ],
            scores,
        )
        for answer in output.outputs
    ]


def serve(engine: Engine, requests, arrivals, aborts=()) -> dict[str, list]:
    """Serve all requests; returns their answers. The scheduler is checked after each step."""
    requests_by_name = {}
    step = 0
    while engine.busy or step <= max(arrivals.values()):
        for name, at in arrivals.items():
            if at == step:
                requests_by_name[name] = engine.add(name, *requests[name])
        for name, at in aborts:
            if at == step:
                engine.abort(name)
        engine.step()
        engine.scheduler.check()
        step += 1
    return {name: bits(request) for name, request in requests_by_name.items()}


STRUCTURED_OUTPUTS = [
    None,
    None,
    None,
    {"regex": "[a-z ]{20,60}"},
    {"json_object": True},
    {"choice": ["yes", "no"]},
]


def mix(rng: random.Random, vocab: int) -> tuple[dict, dict]:
    """Requests with random parameters, and the steps at which they arrive."""
    requests = {}
    arrivals = {}
    prompts = []
    for index in range(rng.randint(2, 8)):
        start = rng.choice(prompts)[: rng.randint(0, 120)] if prompts and rng.random() < 0.6 else []
        prompts.append(
            start + [rng.randrange(6, vocab) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 90)))]
        )
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0, 0, 0.8, 1.2)),
            seed=index,
            top_p=rng.choice((1, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            repetition_penalty=rng.choice((1, 1, 1.3)),
            presence_penalty=rng.choice((0, 0, 0.8)),
            frequency_penalty=rng.choice((0, 0, 0.4)),
            max_tokens=rng.randint(1, 80),
            min_tokens=rng.choice((0, 0, 1)),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            stop=rng.choice(([], [], ["e"], ["the", ". "])),
            bad_words=rng.choice(([], [], ["a", "Once upon"])),
            logit_bias=rng.choice((None, None, {100: 3.0, 200: -3.0})),
            structured_outputs=rng.choice(STRUCTURED_OUTPUTS),
            ignore_eos=rng.random() < 0.3,
        )
        requests[str(index)], arrivals[str(index)] = (prompts[-1], params), rng.randint(0, 12)
    return requests, arrivals
