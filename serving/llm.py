"""`LLM`: the engine as a plain Python object, for batches and for streams."""

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

from ..model.text.chat_template import PromptError
from ..model.text.tokenizer import Tokenizer
from .api.errors import RequestError
from .api.options import Pooling, options_of
from .api.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from .api.params import PLAIN, SamplingParams, Terms
from .api.validation import shown
from .build import make_engine
from .engine.beam_search import BeamSearchOutput, BeamSearchParams, search
from .engine.engine import Engine
from .observe.metrics import Metrics
from .progress import bar
from .request import pooling, scoring

Prompt = str | Seq[int] | Mapping[str, Any]
TERMS = tuple(field.name for field in fields(Terms))
PROMPT_KEYS = ("prompt", "prompt_token_ids", *TERMS)


class LLM:
    """A model that is ready to generate. `LLM()` is the bundled one; `model` is a folder or a Hub id."""

    def __init__(self, model: str | None = None, *, progress=None, engine: Engine | None = None, **options: Any):
        """With an `engine` that exists, nothing is loaded."""
        self.engine = engine or make_engine(options_of(model, **options), progress or (lambda note: None))
        self.ids, self.metrics = itertools.count(), Metrics(self.engine)
        self.engine.observers.append(self.metrics)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        if self.engine.tokenizer is None:
            raise RequestError("skip_tokenizer_init", "is set, so there is no tokenizer")
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; the results come in the order of the prompts."""
        batch = prompt_list(prompts)
        return self.run(batch, params_list(sampling_params, len(batch)), use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; requests that run go on."""
        self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, Any]:
        """The metrics so far, under the names that Prometheus reads."""
        return self.metrics.values()

    def expert_loads(self) -> dict[int, dict[str, list]]:
        """By layer of a mixture of experts: the tokens that each expert got, counted every 64 steps."""
        return self.engine.expert_loads()

    def rebalance_experts(self) -> dict[str, float]:
        """With `expert_redundancy`: place the experts after their recent loads, a layer in each of the next steps."""
        return self.engine.rebalance_experts()

    def sleep(self, level: int = 1, keep_pages: bool = False) -> None:
        """Free the device's memory until `wake_up()`: nothing is compiled again, and no request is lost.

        At level 1 the weights wait in host memory, at level 2 they are dropped and read again. Computed pages are
        dropped unless `keep_pages` sends them to host memory too.
        """
        self.engine.sleep(level, keep_pages)

    def wake_up(self) -> None:
        """Serve again."""
        self.engine.wake_up()

    def is_sleeping(self) -> bool:
        return self.engine.asleep

    def close(self) -> None:
        """Abort what runs; with `kv_cache_disk`, computed pages are kept for the next process."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chat(
        self,
        messages: Seq[Any],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them; each is a list of {"role", "content"}."""
        conversations = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [
            self.chat_prompt(messages, add_generation_prompt=add_generation_prompt, **template_options)
            for messages in conversations
        ]
        return self.run(prompts, params_list(sampling_params, len(prompts)), use_tqdm)

    def chat_prompt(self, messages: Seq[Mapping[str, Any]], **template_options: Any) -> dict[str, Any]:
        """The prompt of one conversation, as text and as token ids."""
        tokenizer = self.get_tokenizer()
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError("messages", f'must be {{"role", "content"}} each, got {shown(message)}')
        try:
            text = tokenizer.apply_chat_template([dict(message) for message in messages], **template_options)
            return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        except PromptError as error:
            raise RequestError("messages", str(error)) from None

    def beam_search(self, prompts: Prompt | Seq[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of every prompt."""
        parsed = [parse_prompt(prompt, self.engine.tokenizer) for prompt in prompt_list(prompts)]
        return search(self.engine, [tokens for _, tokens, _ in parsed], params, [terms for *_, terms in parsed])

    def embed(
        self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True, dimensions: int | None = None
    ) -> list[EmbeddingRequestOutput]:
        """Every prompt as a vector of length 1: its last hidden state, or with `pooling="mean"` the mean of all.

        With `dimensions` it has so many numbers, the first ones.
        """
        pooling.check_dimensions(dimensions, self.engine.config.dim)
        batch = prompt_list(prompts)
        outputs = self.run(batch, [pooling.PARAMS] * len(batch), use_tqdm, self.engine.pooling)
        return [pooling.embedding(output, dimensions) for output in outputs]

    encode = embed

    def score(
        self, text_1: str | Seq[str], text_2: str | Seq[str], use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """How likely each second text is after its first one: the mean log-probability of its tokens.

        One text goes with each of the others. The two are cut into tokens as one text; a token that holds the end of
        the first and the beginning of the second counts for the second.
        """
        pairs = [scoring.pair_tokens(self.get_tokenizer(), *pair) for pair in scoring.pairs(text_1, text_2)]
        outputs = self.run([tokens for tokens, _ in pairs], [scoring.PARAMS] * len(pairs), use_tqdm)
        return [scoring.scored(output, first) for output, (_, first) in zip(outputs, pairs, strict=True)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The result as it grows, token by token; closing the iterator aborts the request."""
        params = sampling_params or SamplingParams()
        if params.num_sequences > params.n:
            raise RequestError("best_of", "cannot be streamed: which answers are the likeliest shows at the end")
        request = self.add(prompt, params)
        try:
            while not request.finished:
                if request in self.engine.step() and not request.finished:
                    yield request.output()
            yield request.output()  # also where another stream's steps have brought the end
        finally:
            self.engine.abort(request.request_id)
            self.drain()

    def run(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        use_tqdm: bool,
        pooling: Pooling | None = None,
    ) -> list[RequestOutput]:
        """Serve all requests to their ends; one that is refused ends the call before any is computed."""
        requests = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                requests.append(self.add(prompt, own, pooling))
            with bar(len(requests), use_tqdm) as advance:
                while self.engine.busy:
                    done = [request for request in self.engine.step() if request.finished]
                    advance(len(done), sum(seq.num_output for request in done for seq in request.sequences))
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            self.drain()
            raise
        return [request.output() for request in requests]

    def drain(self) -> None:
        """Take in the steps that are still under way, so that the next call starts clean."""
        while self.engine.under_way:
            self.engine.step()

    def add(self, prompt: Prompt, params: SamplingParams, pooling: Pooling | None = None):
        """Queue one prompt."""
        text, tokens, terms = parse_prompt(prompt, self.engine.tokenizer)
        return self.engine.add(str(next(self.ids)), tokens, params, text, terms, pooling)


def prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many; a flat list of integers is one."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def params_list(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling parameters for each prompt: one for all, or one each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"has {len(params)} entries for {count} prompts")
    return list(params)


def parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int], Terms]:
    """(text or None, token ids, terms) of a prompt given as text, as ids or as a dict of either, with terms."""
    terms = PLAIN
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - set(PROMPT_KEYS):
            raise RequestError("prompt", f"has the key {shown(min(unknown))}; it takes {', '.join(PROMPT_KEYS)}")
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        terms = Terms(**{key: prompt[key] for key in TERMS if key in prompt})
        if tokens is not None:
            return text, list(tokens), terms
        prompt = text
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("prompt", "is empty; it must have at least one character")
        if tokenizer is None:
            raise RequestError("prompt", "is text, and skip_tokenizer_init is set; give prompt_token_ids")
        try:
            return prompt, tokenizer.encode(prompt), terms
        except PromptError as error:
            raise RequestError("prompt", str(error)) from None
    if prompt is None or isinstance(prompt, (bytes, int, float)):
        raise RequestError("prompt", f"must be text, a list of token ids, or a dict of either, got {shown(prompt)}")
    return None, list(prompt), terms
