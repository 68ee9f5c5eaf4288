"""`LLM`: the engine as a plain Python object, for batches and for streams."""

import atexit
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from ..model.config import FAR
from ..model.text.chat_template import PromptError
from ..model.text.tokenizer import Tokenizer
from .adapter_store import with_adapter
from .api.errors import RequestError
from .api.lora import LoRARequest, adapters_list
from .api.options import EngineOptions, Pooling, no_flag, options_of, takes_options
from .api.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from .api.params import PLAIN, RequestOutputKind, SamplingParams, Terms, declarations
from .api.prompts import Prompt, TokensPrompt
from .api.validation import refuse_unknown, shown
from .build import make_engine
from .chat_prompt import render
from .defaults import default_params
from .engine.beam_search import BeamSearchOutput, BeamSearchParams, search
from .engine.engine import Engine
from .engine.step_record import Observer, StepRecord
from .engine.turns import Turns
from .observe.metrics import Metrics
from .progress import bar, stages
from .protocol.chat import parse_messages
from .protocol.fields import TEMPLATE, template_options
from .protocol.tools import parse_tools
from .request import classes, pooling, scoring
from .request.pair_scores import pair_scores
from .request.request import Request
from .search import Reward, SearchOutput, SearchParams, is_chat
from .search import search as search_answers

TERMS = tuple(declarations(Terms))
PROMPT_KEYS = ("prompt", "prompt_token_ids", *TERMS)


@dataclass(frozen=True)
class Arguments(EngineOptions):
    """What `LLM` and `AsyncLLM` take."""

    _: KW_ONLY
    progress: Callable[[str], Any] | None = no_flag(
        None, "Is told each stage of loading, in place of a terminal that shows it."
    )
    engine: Engine | None = no_flag(None, "An engine that exists: nothing is loaded.")


class LLM:
    """A model that is ready to generate. `LLM()` is the bundled one; `model` is a folder or a Hub id.

    Several threads may use it at a time: their requests are served together. A fork of its process cannot use it.
    """

    @takes_options(Arguments)
    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str], Any] | None = None,
        engine: Engine | None = None,
        **options: Any,
    ):
        made = engine
        if made is None:
            with stages(progress) as note:
                made = make_engine(options_of(model, **options), note)
        self.engine = made
        self.ids, self.metrics, self.turns = itertools.count(), Metrics(self.engine), Turns()
        self.engine.observers.append(self.metrics)
        if engine is None:
            close_at_exit(self, self.engine.close)

    def turn(self) -> Turns:
        """Only who has it uses the engine."""
        self.engine.lifecycle.check_process()
        return self.turns

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
        *,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        priority: int | Seq[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; the results come in the order of the prompts.

        `sampling_params`, `lora_request` and `priority` are for all prompts, or one for each; the lower priority goes
        first.
        """
        batch = prompt_list(prompts)
        priorities = list(priority) if isinstance(priority, Iterable) else [priority] * len(batch)
        if len(priorities) != len(batch):
            raise RequestError("priority", f"has {len(priorities)} entries for {len(batch)} prompts")
        params = params_list(self.or_default(sampling_params), len(batch))
        return self.run(batch, params, use_tqdm, priorities=priorities, adapters=lora_request)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling parameters get: the model's defaults, from its generation_config.json."""
        return default_params(self.engine)

    def or_default(self, params: SamplingParams | Seq[SamplingParams] | None) -> SamplingParams | Seq[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; requests that run go on."""
        with self.turn():
            self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, Any]:
        """The metrics so far, under the names that Prometheus reads."""
        with self.turn():
            return self.metrics.values()

    def expert_loads(self) -> dict[int, dict[str, list]]:
        """By layer of a mixture of experts: the tokens that each expert got, counted every 64 steps."""
        with self.turn():
            return self.engine.runner.read_expert_loads()

    def rebalance_experts(self) -> dict[str, float]:
        """With `expert_redundancy`: place the experts after their recent loads, a layer in each of the next steps."""
        with self.turn():
            return self.engine.runner.rebalance_experts()

    def sleep(self, level: int = 1, keep_pages: bool = False) -> None:
        """Free the device's memory until `wake_up()`: nothing is compiled again, and no request is lost.

        At level 1 the weights wait in host memory, at level 2 they are dropped and read again. Computed pages are
        dropped unless `keep_pages` sends them to host memory too. Calls of other threads that are under way end with
        `NotServing`.
        """
        with self.turn():
            self.engine.sleep(level, keep_pages)

    def wake_up(self) -> None:
        """Serve again."""
        with self.turn():
            self.engine.lifecycle.wake_up()

    def is_sleeping(self) -> bool:
        return self.engine.lifecycle.is_asleep

    def close(self) -> None:
        """Abort what runs; with `kv_cache_disk`, computed pages are kept for the next process.

        It happens by itself when the object is collected, and when the process ends.
        """
        if not self.engine.lifecycle.is_forked:
            with self.turn():
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
        *,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them; each is a list of messages as OpenAI's chat API has them.

        tools: functions that the model may call, as OpenAI's chat API has them; their calls stand in the answer's text.
        chat_template: a Jinja source in place of the model's own.
        chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
        add_generation_prompt: whether the prompt ends with the beginning of an answer; None: where no message goes on.
        continue_final_message: let the answer go on from the end of the last message.
        """
        several = bool(messages) and isinstance(messages, Seq) and not isinstance(messages[0], str | Mapping)
        options = {
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        prompts = [self.chat_prompt(one, tools, **options) for one in (messages if several else [messages])]
        params = params_list(self.or_default(sampling_params), len(prompts))
        return self.run(prompts, params, use_tqdm, adapters=lora_request)

    def chat_prompt(
        self, messages: Seq[Mapping[str, Any]], tools: Seq[Mapping[str, Any]] | None = None, **options: Any
    ) -> TokensPrompt:
        """The prompt of one conversation, as text and as token ids; the options are those of `chat`."""
        refuse_unknown(options, TEMPLATE)
        self.engine.lifecycle.check_process()
        tokenizer = self.get_tokenizer()
        given = {name: value for name, value in options.items() if value is not None}
        ignored: set[str] = set()
        asked = parse_messages(list(messages) if isinstance(messages, tuple) else messages, ignored)
        if ignored:
            warnings.warn(f"{', '.join(sorted(ignored))}: unknown here, and ignored", stacklevel=3)
        told, _ = parse_tools(list(tools or ()), nested=True)
        text = render(tokenizer, asked, told, template_options(given))
        try:
            return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
        except PromptError as error:
            raise RequestError("messages", str(error)) from None

    def beam_search(
        self, prompts: Prompt | Seq[Prompt], params: BeamSearchParams, *, concurrency_limit: int | None = None
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of every prompt; with `concurrency_limit`, of so many prompts at a time."""
        parsed = [parse_prompt(prompt, self.engine.tokenizer) for prompt in prompt_list(prompts)]
        tokens, terms = [tokens for _, tokens, _ in parsed], [terms for *_, terms in parsed]
        return search(self.engine, tokens, params, terms, self.turn, concurrency_limit)

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        use_tqdm: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Every prompt as a vector of length 1: its last hidden state, or what `pooling` or the model's folder says.

        With `dimensions` it has so many numbers, the first ones. `prompt_name`: which of the folder's prompts comes
        before those that are text, such as "query".
        """
        pooling.check_dimensions(dimensions, self.engine.config)
        how = self.engine.embedder
        first = pooling.before(how, prompt_name)
        tokenizer = self.engine.tokenizer
        batch = [pooling.prepare(prompt, first, how, tokenizer) for prompt in prompt_list(prompts)]
        params = [pooling.PARAMS] * len(batch)
        outputs = self.run(batch, params, use_tqdm, how.pooling, adapters=lora_request)
        return [pooling.embedding(output, dimensions, how.normalize) for output in outputs]

    encode = embed

    def classify(self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True) -> list[ClassificationRequestOutput]:
        """The probability of each class for every prompt, by a model whose head has classes in place of tokens."""
        classes.check(self.engine.config)
        batch = prompt_list(prompts)
        outputs = self.run(batch, [pooling.PARAMS] * len(batch), use_tqdm, "last")
        return [classes.classified(output, self.engine.config) for output in outputs]

    def reward(self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True) -> list[PoolingRequestOutput]:
        """The reward of every prompt, a question with its answer: the one number of the model's head, as it is.

        A model of process rewards gives a number for each step: the probability that it is right.
        """
        config = self.engine.config
        classes.check(config, reward=True)
        batch = prompt_list(prompts)
        how: Pooling = "last" if config.classes is None or config.classes.step is None else "steps"
        outputs = self.run(batch, [pooling.PARAMS] * len(batch), use_tqdm, how)
        return [classes.rewarded(output, config) for output in outputs]

    def score(
        self, text_1: str | Seq[str], text_2: str | Seq[str], use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """What the model says of each text with its second one; a single text goes with each of the others.

        A model that writes: the mean log-probability of the second text's tokens after the first. Both are cut into
        tokens as one text; a token that holds the end of the first and the beginning of the second counts for the
        second. A reranker (a model with one class): the probability that it gives a query and a document. An embedding
        model: the cosine of the two.
        """
        engine = self.engine
        asked = pair_scores(engine.config, engine.embedder, self.get_tokenizer(), scoring.pairs(text_1, text_2))
        prompts: list[Prompt] = [{"prompt_token_ids": one.tokens} for one in asked.asked]
        how = asked.asked[0].pooling
        seconds = [one.second for one in asked.asked]
        return asked.scores(self.run(prompts, [one.params for one in asked.asked], use_tqdm, how, seconds=seconds))

    def search(
        self,
        prompts: Any,
        params: SearchParams | None = None,
        *,
        reward: "Reward | LLM | None" = None,
    ) -> list[SearchOutput]:
        """The best of several answers to every prompt: a text, token ids, or a conversation as `chat` has it.

        `reward` says how good answers are: `reward(prompt, answers)` gives a number for each, or it is a model with one
        class. See `SearchParams` for the methods.
        """
        batch = [prompts] if is_chat(prompts) else prompt_list(prompts)
        return search_answers(self, batch, params or SearchParams(), reward)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """The result as it grows, token by token; closing the iterator aborts the request.

        What each result holds is `sampling_params.output_kind`.
        """
        params = sampling_params or self.get_default_sampling_params()
        if params.num_sequences > params.n:
            raise RequestError("best_of", "cannot be streamed: which answers are the likeliest shows at the end")
        read = Request.delta if params.output_kind is RequestOutputKind.DELTA else Request.output
        request = self.add(prompt, params)
        try:
            over = False
            while not over:
                with self.turn():
                    grown = not request.finished and request in self.step()
                    over = request.finished  # perhaps by the steps of another stream
                    shown = over or grown and params.output_kind is not RequestOutputKind.FINAL_ONLY
                    result = read(request) if shown else None
                if result is not None:
                    yield result
        finally:
            self.abort([request])

    def run(
        self,
        prompts: Seq[Prompt],
        params: Seq[SamplingParams],
        use_tqdm: bool,
        pooling: Pooling | None = None,
        priorities: Seq[int | None] | None = None,
        seconds: Seq[int] | None = None,
        adapters: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Serve all requests to their ends; one that is refused ends the call before any is computed."""
        batch, requests = Batch(), []
        with self.turn():
            self.engine.observers.append(batch)
        try:
            count = len(prompts)
            each = adapters_list(adapters, count)
            for prompt, own, priority, second, adapter in zip(
                prompts, params, priorities or [None] * count, seconds or [FAR] * count, each, strict=True
            ):
                requests.append(self.add(prompt, own, pooling, priority, batch, second, adapter))
            with bar(len(requests), use_tqdm) as advance:
                while batch.left:
                    with self.turn():
                        if batch.left:  # else another thread's steps have ended them
                            self.step()
                    advance(*batch.ended())
        except BaseException:
            self.abort(requests)
            raise
        finally:
            with self.turn():
                self.engine.observers.remove(batch)
        return [request.output() for request in requests]

    def step(self) -> list[Request]:
        """Make a step, if the engine serves; the requests that got tokens, or ended."""
        self.engine.lifecycle.check_serving()
        return self.engine.step()

    def abort(self, requests: Seq[Request]) -> None:
        """End requests, and take in the steps that are still under way, so that the next call starts clean."""
        if self.engine.lifecycle.is_forked:
            return
        with self.turn():
            for request in requests:
                self.engine.abort(request.request_id)
            if not self.engine.requests:
                self.engine.drain()

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        pooling: Pooling | None = None,
        priority: int | None = None,
        batch: "Batch | None" = None,
        second: int = FAR,
        adapter: LoRARequest | None = None,
    ) -> Request:
        """Queue one prompt."""
        text, tokens, terms = parse_prompt(prompt, self.engine.tokenizer, priority)
        terms = with_adapter(terms, self.engine.adapters, adapter)
        with self.turn():
            request = self.engine.add(str(next(self.ids)), tokens, params, text, terms, pooling, second)
            if batch is not None:
                request.watched = False
                batch.left.add(request)
        return request


class Batch(Observer):
    """The requests of one call that have not ended, whoever makes the steps that end them."""

    def __init__(self):
        self.left: set[Request] = set()
        self.requests = self.tokens = 0  # that have ended since the last look

    def observe(self, record: StepRecord) -> None:
        for request in record.changed:
            if request.finished and request in self.left:
                self.left.remove(request)
                self.requests += 1
                self.tokens += sum(seq.num_output for seq in request.sequences)

    def ended(self) -> tuple[int, int]:
        """How many have ended since the last look, and how many tokens they have."""
        found = self.requests, self.tokens
        self.requests = self.tokens = 0
        return found


def close_at_exit(owner: Any, close: Callable[[], None]) -> None:
    """Close what an object made when it is collected, or else when the process ends."""
    end = weakref.finalize(owner, close)
    end.atexit = False  # its own hook may be older than JAX's, and would run after it
    atexit.register(end)


def prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many; a flat list of integers is one."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def params_list(params: SamplingParams | Seq[SamplingParams], count: int) -> list[SamplingParams]:
    """Sampling parameters for each prompt: one for all, or one each."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"has {len(params)} entries for {count} prompts")
    return list(params)


def parse_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, priority: int | None = None
) -> tuple[str | None, list[int], Terms]:
    """(text or None, token ids, terms) of a prompt given as text, as ids or as a dict of either, with terms."""
    terms = PLAIN if priority is None else Terms(priority=priority)
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - set(PROMPT_KEYS):
            raise RequestError("prompt", f"has the key {shown(min(unknown))}; it takes {', '.join(PROMPT_KEYS)}")
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if priority is not None and "priority" in prompt:
            raise RequestError("priority", "is given with the prompt and beside it; leave one of them out")
        terms = replace(terms, **{key: prompt[key] for key in TERMS if key in prompt})
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
