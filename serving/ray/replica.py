"""Replicas: a server without a socket, and an engine that computes prompts for others."""

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..api.options import make_options
from ..api.params import RequestOptions, SamplingParams
from ..async_llm import AsyncLLM, EngineRequest
from ..build import folder_of, identity, make_engine
from ..engine.engine import Engine
from ..http.app import make_app
from ..http.endpoints.status import model_state
from ..http.errors import as_http
from ..http.logs import setup_logging
from ..http.models import Model, Models
from ..http.service import Service
from ..observe.metric_families import Family
from .affinity import token_prefix
from .kv_transfer import Handover, check_same_identity, require_host_cache
from .message import ForwardedRequest, ReplicaConnection, ResponsePiece, ResponseStart
from .prefill import compute_prompt, fetch_missing_pages
from .scale import DeploymentPlan

READING = 30.0  # seconds to wait for a prefill replica
PAUSE = 30.0


class ReplicaFailed(RuntimeError):
    """The request failed here but another replica can answer it."""


class Replica:
    """The application of `quire serve`, called by Ray instead of through a socket."""

    async def __init__(self, plan: DeploymentPlan, reader: Any = None):
        setup_logging(plan.log_json, plan.log_level)
        self.plan = plan
        self.reader = reader
        self.resumes = 0.0
        models = [
            Model(names, partial(make_engine, make_options(name, **plan.replica_options)))
            for name, names in plan.models
        ]
        fetches = None if reader is None else self.fetch_pages
        self.service = Service(Models(models, plan.settings.max_loaded), plan.settings, fetches)
        self.app = make_app(self.service)
        await self.service.load_first()
        self.heart = asyncio.create_task(self.service.heartbeat())
        self.identity = self.digest()
        if reader is not None:
            check_same_identity(
                await reader.identity.remote(), require_host_cache(self.engine.tables[0]).identity
            )

    @property
    def engine(self) -> Engine:
        return self.service.models.find(None).llm.engine

    def digest(self) -> bytes:
        """Return a digest of everything besides the request that determines an answer."""
        options = make_options(self.plan.models[0][0], **self.plan.options)
        settings = self.plan.settings
        engine_identity = identity(folder_of(options), self.engine.config, options)
        content = (
            engine_identity,
            self.plan.models,
            settings.version,
            settings.formats,
            self.engine.max_len,
        )
        return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()

    async def answer(self, call: ForwardedRequest) -> AsyncIterator[ResponseStart | ResponsePiece]:
        """Yield the response to a request; raise ReplicaFailed if another replica can answer it."""
        try:
            async for message in ReplicaConnection(call, self.identity).messages(self.app):
                yield message
        except Exception as error:
            raise ReplicaFailed(as_http(error).message) from None

    async def fetch_pages(self, llm: AsyncLLM, ask: EngineRequest) -> None:
        """Fetch a prompt's pages from a prefill replica, unless one has just failed."""
        if time.monotonic() >= self.resumes:
            await fetch_missing_pages(llm, ask, self.compute_remotely)

    async def compute_remotely(self, ask: EngineRequest) -> Handover:
        """Compute a prompt on a prefill replica; after a failure, prompts are computed here for a
        while.
        """
        prefix = token_prefix(ask.tokens, ask.request_options.cache_salt)
        try:
            async with asyncio.timeout(READING):
                return await self.reader.read.remote(
                    PromptToRead(prefix, ask.tokens, ask.request_options)
                )
        except Exception:
            self.resumes = time.monotonic() + PAUSE
            raise

    async def metrics(self) -> list[tuple[dict[str, str], Family]]:
        """Return the metrics of the engines and of the application, labelled by replica and
        model.
        """
        engines = [(model.name, model.llm.metrics) for model in self.service.models.ready()]
        labels = {"replica": replica_name()}
        families = [
            (labels | {"model_name": name}, family)
            for name, metrics in engines
            for family in metrics.families()
        ]
        return families + [(labels, family) for family in self.service.http_metrics.families()]

    async def check_health(self) -> None:
        """Raise if a model has failed; Serve calls this periodically and replaces the replica."""
        for model in self.service.models.ready():
            if (state := model_state(self.service, model)) in ("failed", "stalled"):
                raise ReplicaFailed(f"model {model.name} has {state}")

    def __del__(self):
        """Serve calls this after the last answer."""
        if hasattr(self, "heart"):
            self.heart.cancel()
            self.service.close()


@dataclass(frozen=True)
class PromptToRead:
    """A prompt that a prefill replica shall compute."""

    prefix: tuple[bytes, ...]
    tokens: list[int]
    request_options: RequestOptions


class PrefillReplica:
    """Computes prompts for the replicas that decode."""

    async def __init__(self, plan: DeploymentPlan):
        setup_logging(plan.log_json, plan.log_level)
        options = make_options(plan.models[0][0], **plan.replica_options)
        self.llm = AsyncLLM(engine=await asyncio.to_thread(make_engine, options))
        self.ids = itertools.count()

    async def identity(self) -> bytes:
        return require_host_cache(self.llm.engine.tables[0]).identity

    async def read(self, prompt: PromptToRead) -> Handover:
        ask = EngineRequest(prompt.tokens, SamplingParams(), None, prompt.request_options)
        handover = await compute_prompt(self.llm, f"read-{next(self.ids)}", ask)
        return await asyncio.to_thread(handover.on_host)

    async def metrics(self) -> list[tuple[dict[str, str], Family]]:
        labels = {"replica": replica_name(), "model_name": "reader"}
        return [(labels, family) for family in self.llm.metrics.families()]

    async def check_health(self) -> None:
        if self.llm.thread.failure is not None:
            raise ReplicaFailed("the engine has failed")

    def __del__(self):
        if hasattr(self, "llm"):
            self.llm.close()


def replica_name() -> str:
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id
