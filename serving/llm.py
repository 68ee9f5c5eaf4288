"""`LLM`: the engine as a plain Python object, for batches and for streams."""

import atexit
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, cast

from ..model.config import FAR
from ..model.text.chat_template import PromptError
from ..model.text.tokenizer import Tokenizer
from .adapter_store import with_adapter
from .api.content import MEDIA_FIELD, MessageImage, refuse_images, take_images
from .api.errors import RequestError
from .api.flags import no_flag
from .api.lora import LoRARequest, adapter_per_prompt
from .api.options import EngineOptions, Pooling, make_options, takes_options
from .api.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from .api.params import PLAIN, RequestOptions, RequestOutputKind, SamplingParams, declarations
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
from .request.media import PromptMedia
from .request.pair_scores import pair_scores
from .request.request import Request
from .search import Reward, SearchOutput, SearchParams, is_chat
from .search import search as search_answers

REQUEST_OPTIONS = tuple(declarations(RequestOptions))
PROMPT_KEYS = ("prompt", "prompt_token_ids", MEDIA_FIELD, *REQUEST_OPTIONS)


@dataclass(frozen=True)
class Arguments(EngineOptions):
    """The arguments of `LLM` and `AsyncLLM`."""

    _: KW_ONLY
    progress: Callable[[str], Any] | None = no_flag(
        None, "Is told each stage of loading, in place of a terminal that shows it."
    )
    engine: Engine | None = no_flag(None, "An engine that exists: nothing is loaded.")


class LLM:
    """A model that is ready to generate. `LLM()` is the bundled one; `model` is a folder or a Hub
    id.

    Several threads may use it at a time; their requests are batched together. It cannot be used in
    a fork of its process.
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
        loaded_engine = engine
        if loaded_engine is None:
            with stages(progress) as note:
                loaded_engine = make_engine(make_options(model, **options), note)
        self.engine = loaded_engine
        self.ids = itertools.count()
        self.metrics = Metrics(self.engine)
        self.turns = Turns()
        self.engine.observers.append(self.metrics)
        if engine is None:
            close_at_exit(self, self.engine.close)

    def turn(self) -> Turns:
        """Only who has it uses the engine."""
        self.engine.lifecycle.check_process()
        return self.turns

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
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
        """Generate for every prompt; the results are in the order of the prompts.

        `sampling_params`, `lora_request` and `priority` are for all prompts, or lists with one per
        prompt. Lower priorities are served first.
        """
        batch = prompt_list(prompts)
        priorities = list(priority) if isinstance(priority, Iterable) else [priority] * len(batch)
        if len(priorities) != len(batch):
            raise RequestError(
                "priority", f"has {len(priorities)} entries for {len(batch)} prompts"
            )
        params = params_list(self.or_default(sampling_params), len(batch))
        return self.run(batch, params, use_tqdm, priorities=priorities, adapters=lora_request)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters, from the model's generation_config.json."""
        return default_params(self.engine)

    def or_default(
        self, params: SamplingParams | Seq[SamplingParams] | None
    ) -> SamplingParams | Seq[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; running requests continue."""
        with self.turn():
            self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, Any]:
        """Return the metrics so far, with their Prometheus names."""
        with self.turn():
            return self.metrics.values()

    def expert_loads(self) -> dict[int, dict[str, list]]:
        """Return the tokens that each expert has computed, by layer; they are read from the device
        every 64 steps.
        """
        with self.turn():
            return self.engine.runner.read_expert_loads()

    def rebalance_experts(self) -> dict[str, float]:
        """With `expert_redundancy`: place the experts by their recent loads, one layer per step."""
        with self.turn():
            return self.engine.runner.rebalance_experts()

    def sleep(self, level: int = 1, keep_pages: bool = False) -> None:
        """Free the device's memory until `wake_up()`: nothing is recompiled, and no request is
        lost.

        At level 1 the weights move to host memory, at level 2 they are dropped and read again.
        Computed pages are dropped unless `keep_pages` moves them to host memory too. Calls in
        flight in other threads end with `NotServing`.
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
        """Abort running requests; with `kv_cache_disk`, keep computed pages for the next process.

        Called automatically when the object is collected and when the process ends.
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
        """Answer a conversation, or a list of them; each is a list of messages in OpenAI's format.

        tools: functions that the model may call, in OpenAI's format; calls are in the answer's
            text.
        chat_template: a Jinja source that replaces the model's template.
        chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
        add_generation_prompt: end with the start of an answer; None: unless a message is continued.
        continue_final_message: continue the last message instead of starting an answer.
        """
        has_many = (
            bool(messages)
            and isinstance(messages, Seq)
            and not isinstance(messages[0], str | Mapping)
        )
        options = {
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        prompts = [
            self.chat_prompt(conversation, tools, **options)
            for conversation in (messages if has_many else [messages])
        ]
        params = params_list(self.or_default(sampling_params), len(prompts))
        return self.run(prompts, params, use_tqdm, adapters=lora_request)

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have images."""
        return self.engine.media_reader is not None

    def image_placeholder(self) -> str:
        """The text that stands for an image in a prompt of `generate`."""
        reader = self.engine.media_reader
        if reader is None:
            raise RequestError("model", "reads text only")
        tokenizer = self.get_tokenizer()
        tokens = reader.multimodal.layout.prompt_tokens
        return "".join(tokenizer.token_text(token) for token in tokens)

    def chat_prompt(
        self,
        messages: Seq[Mapping[str, Any]],
        tools: Seq[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> TokensPrompt:
        """Return the prompt of one conversation, as text and token ids; the options are those of
        `chat`.
        """
        refuse_unknown(options, TEMPLATE)
        self.engine.lifecycle.check_process()
        tokenizer = self.get_tokenizer()
        given_options = {name: value for name, value in options.items() if value is not None}
        ignored: set[str] = set()
        checked_messages = parse_messages(
            list(messages) if isinstance(messages, tuple) else messages, ignored
        )
        if ignored:
            warnings.warn(f"{', '.join(sorted(ignored))}: unknown here, and ignored", stacklevel=3)
        checked_tools, _ = parse_tools(list(tools or ()), nested=True)
        checked_messages, images = take_images(checked_messages)
        self.engine.check_images(images)
        text = render(tokenizer, checked_messages, checked_tools, template_options(given_options))
        try:
            prompt: TokensPrompt = {
                "prompt": text,
                "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False),
            }
            if images:
                prompt["multi_modal_data"] = {"image": [image.content for image in images]}
            return prompt
        except PromptError as error:
            raise RequestError("messages", str(error)) from None

    def beam_search(
        self,
        prompts: Prompt | Seq[Prompt],
        params: BeamSearchParams,
        *,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of every prompt, for `concurrency_limit` prompts at a
        time.
        """
        batch = prompt_list(prompts)
        for prompt in batch:
            refuse_images(prompt, "beam search")
        parsed = [parse_prompt(prompt, self.engine.tokenizer) for prompt in batch]
        tokens = [tokens for _, tokens, _ in parsed]
        request_options = [options for *_, options in parsed]
        return search(self.engine, tokens, params, request_options, self.turn, concurrency_limit)

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        use_tqdm: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed every prompt as a normalised vector, pooled by `pooling` or as the model's folder
        says.

        dimensions: number of leading dimensions to return.
        prompt_name: which of the folder's prompts precedes text prompts, such as "query".
        """
        pooling.check_dimensions(dimensions, self.engine.config)
        embedder = self.engine.embedder
        prefix = pooling.prompt_prefix(embedder, prompt_name)
        tokenizer = self.engine.tokenizer
        batch = [
            pooling.prepare_prompt(prompt, prefix, embedder, tokenizer)
            for prompt in prompt_list(prompts)
        ]
        params = [pooling.PARAMS] * len(batch)
        outputs = self.run(batch, params, use_tqdm, embedder.pooling, adapters=lora_request)
        return [pooling.embedding(output, dimensions, embedder.normalize) for output in outputs]

    encode = embed

    def classify(
        self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """Return the class probabilities of every prompt, from a model with a classification
        head.
        """
        classes.check_classifier(self.engine.config)
        batch = prompt_list(prompts)
        outputs = self.run(batch, [pooling.PARAMS] * len(batch), use_tqdm, "last")
        return [classes.classification_output(output, self.engine.config) for output in outputs]

    def reward(
        self, prompts: Prompt | Seq[Prompt], use_tqdm: bool = True
    ) -> list[PoolingRequestOutput]:
        """Return the reward of every prompt (a question with its answer): the value of the model's
        head.

        A process reward model returns, for each step, the probability that it is right.
        """
        config = self.engine.config
        classes.check_classifier(config, reward=True)
        batch = prompt_list(prompts)
        kind: Pooling = "last" if config.classes is None or config.classes.step is None else "steps"
        outputs = self.run(batch, [pooling.PARAMS] * len(batch), use_tqdm, kind)
        return [classes.reward_output(output, config) for output in outputs]

    def score(
        self, text_1: str | Seq[str], text_2: str | Seq[str], use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Score each first text with its second one; a single text is paired with each of the
        others.

        A generative model returns the mean log-probability of the second text's tokens after the
        first. Both are tokenized as one text; a token across the boundary counts for the second. A
        reranker (a model with one class) returns the probability for a query and a document, an
        embedding model the cosine.
        """
        engine = self.engine
        pair_scorer = pair_scores(
            engine.config, engine.embedder, self.get_tokenizer(), scoring.pairs(text_1, text_2)
        )
        prompts: list[Prompt] = [
            {"prompt_token_ids": prompt.tokens} for prompt in pair_scorer.prompts
        ]
        kind = pair_scorer.prompts[0].pooling
        seconds = [prompt.second_start for prompt in pair_scorer.prompts]
        return pair_scorer.scores(
            self.run(
                prompts,
                [prompt.params for prompt in pair_scorer.prompts],
                use_tqdm,
                kind,
                second_starts=seconds,
            )
        )

    def search(
        self,
        prompts: Any,
        params: SearchParams | None = None,
        *,
        reward: "Reward | LLM | None" = None,
    ) -> list[SearchOutput]:
        """Return the best of several answers to every prompt: a text, token ids, or a conversation.

        `reward` rates answers: `reward(prompt, answers)` returns a number for each, or it is a
        model with one class. See `SearchParams` for the methods.
        """
        batch = [prompts] if is_chat(prompts) else prompt_list(prompts)
        return search_answers(self, batch, params or SearchParams(), reward)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the result as it grows, token by token; closing the iterator aborts the request.

        `sampling_params.output_kind` determines the contents of each result.
        """
        params = sampling_params or self.get_default_sampling_params()
        if params.num_sequences > params.n:
            raise RequestError(
                "best_of", "cannot be streamed: which answers are the likeliest shows at the end"
            )
        read = Request.delta if params.output_kind is RequestOutputKind.DELTA else Request.output
        request = self.add(prompt, params)
        try:
            is_finished = False
            while not is_finished:
                with self.turn():
                    has_grown = not request.finished and request in self.step()
                    is_finished = request.finished  # perhaps by the steps of another stream
                    is_due = (
                        is_finished
                        or has_grown
                        and params.output_kind is not RequestOutputKind.FINAL_ONLY
                    )
                    result = read(request) if is_due else None
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
        second_starts: Seq[int] | None = None,
        adapters: LoRARequest | Seq[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Serve all requests to their ends; an invalid request fails the call before anything is
        computed.
        """
        batch = Batch()
        requests = []
        with self.turn():
            self.engine.observers.append(batch)
        try:
            count = len(prompts)
            adapter_list = adapter_per_prompt(adapters, count)
            for prompt, request_params, priority, second_start, adapter in zip(
                prompts,
                params,
                priorities or [None] * count,
                second_starts or [FAR] * count,
                adapter_list,
                strict=True,
            ):
                requests.append(
                    self.add(
                        prompt, request_params, pooling, priority, batch, second_start, adapter
                    )
                )
            with bar(len(requests), use_tqdm) as advance:
                while batch.unfinished:
                    with self.turn():
                        # Otherwise the steps of another thread have finished them.
                        if batch.unfinished:
                            self.step()
                    advance(*batch.take_counts())
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
        """End requests, and take in the steps that are still under way, so that the next call
        starts clean.
        """
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
        second_start: int = FAR,
        adapter: LoRARequest | None = None,
    ) -> Request:
        """Queue one prompt."""
        text, tokens, request_options = parse_prompt(prompt, self.engine.tokenizer, priority)
        request_options = with_adapter(request_options, self.engine.adapters, adapter)
        tokens, media = read_media(self.engine, tokens, prompt)
        with self.turn():
            request = self.engine.add(
                str(next(self.ids)),
                tokens,
                params,
                text,
                request_options,
                pooling,
                second_start,
                media,
            )
            if batch is not None:
                request.watched = False
                batch.unfinished.add(request)
        return request


class Batch(Observer):
    """The unfinished requests of one call, whichever thread runs the steps that finish them."""

    def __init__(self):
        self.unfinished: set[Request] = set()
        self.requests = self.tokens = 0  # finished since the last call of `take_counts`

    def observe(self, record: StepRecord) -> None:
        for request in record.changed:
            if request.finished and request in self.unfinished:
                self.unfinished.remove(request)
                self.requests += 1
                self.tokens += sum(seq.num_output for seq in request.sequences)

    def take_counts(self) -> tuple[int, int]:
        """Return the numbers of requests finished since the last call, and of their tokens."""
        counts = self.requests, self.tokens
        self.requests = self.tokens = 0
        return counts


def close_at_exit(owner: Any, close: Callable[[], None]) -> None:
    """Call `close` when `owner` is collected, or at the latest when the process ends."""
    end = weakref.finalize(owner, close)
    end.atexit = False  # its own hook may be older than JAX's, and would run after it
    atexit.register(end)


def read_media(
    engine: Engine, tokens: list[int], prompt: Prompt
) -> tuple[list[int], PromptMedia | None]:
    """A prompt's tokens with the placeholders of its images, and the images."""
    media_data = prompt.get(MEDIA_FIELD) if isinstance(prompt, Mapping) else None
    if media_data is None:
        return engine.read_images(tokens, ())
    if not isinstance(media_data, Mapping) or set(media_data) != {"image"}:
        raise RequestError(
            MEDIA_FIELD,
            f"must be {{'image': an image or a list of images}}, got {shown(media_data)}",
        )
    images = media_data["image"]
    images = images if isinstance(images, list | tuple) else [images]
    return engine.read_images(tokens, [MessageImage(MEDIA_FIELD, image) for image in images])


def prompt_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Return a list of prompts, given one or many; a flat list of integers is one prompt."""
    given: Any = prompts
    if isinstance(given, (str, Mapping)) or (len(given) and isinstance(given[0], int)):
        return [given]
    return list(given)


def params_list(params: SamplingParams | Seq[SamplingParams], count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, given one for all or one for each."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"has {len(params)} entries for {count} prompts")
    return list(params)


def parse_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, priority: int | None = None
) -> tuple[str | None, list[int], RequestOptions]:
    """Return (text or None, token ids, request options) of a prompt given as text, as ids or as a dict."""
    request_options = PLAIN if priority is None else RequestOptions(priority=priority)
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - set(PROMPT_KEYS):
            raise RequestError(
                "prompt", f"has the key {shown(min(unknown))}; it takes {', '.join(PROMPT_KEYS)}"
            )
        text = prompt.get("prompt")
        tokens = prompt.get("prompt_token_ids")
        if priority is not None and "priority" in prompt:
            raise RequestError(
                "priority", "is given with the prompt and beside it; leave one of them out"
            )
        request_options = replace(
            request_options, **{key: prompt[key] for key in REQUEST_OPTIONS if key in prompt}
        )
        if tokens is not None:
            return text, list(tokens), request_options
        prompt = cast(Prompt, text)
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("prompt", "is empty; it must have at least one character")
        if tokenizer is None:
            raise RequestError(
                "prompt", "is text, and skip_tokenizer_init is set; give prompt_token_ids"
            )
        try:
            return prompt, tokenizer.encode(prompt), request_options
        except PromptError as error:
            raise RequestError("prompt", str(error)) from None
    if prompt is None or isinstance(prompt, (bytes, int, float)):
        raise RequestError(
            "prompt", f"must be text, a list of token ids, or a dict of either, got {shown(prompt)}"
        )
    return None, cast(list[int], list(prompt)), request_options
