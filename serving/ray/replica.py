"""What runs on a replica: a server without a socket, or an engine that reads prompts for others."""

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..api.options import options_of
from ..api.params import SamplingParams, Terms
from ..async_llm import Ask, AsyncLLM
from ..build import folder_of, identity, make_engine
from ..engine.engine import Engine
from ..http.app import make_app
from ..http.endpoints.status import model_state
from ..http.errors import as_http
from ..http.logs import setup_logging
from ..http.models import Model, Models
from ..http.service import Service
from ..observe.metric_families import Family
from .affinity import of_tokens
from .kv_transfer import Handover, check_alike, host_cache_of
from .message import ForwardedRequest, ReplicaConnection, ResponsePiece, ResponseStart
from .prefill import bring, read
from .scale import DeploymentPlan

READING, PAUSE = 30.0, 30.0  # seconds to wait for a prefill replica, and until one that failed is asked again


class ReplicaFailed(RuntimeError):
    """A request that another replica can answer."""


class Replica:
    """The application of `quire serve`, called by Ray in place of a socket."""

    async def __init__(self, plan: DeploymentPlan, reader: Any = None):
        setup_logging(plan.log_json, plan.log_level)
        self.plan, self.reader, self.resumes = plan, reader, 0.0
        models = [Model(names, partial(make_engine, options_of(name, **plan.chosen))) for name, names in plan.models]
        fetches = None if reader is None else self.fetch_pages
        self.service = Service(Models(models, plan.settings.max_loaded), plan.settings, fetches)
        self.app = make_app(self.service)
        await self.service.load_first()
        self.heart = asyncio.create_task(self.service.heartbeat())
        self.identity = self.digest()
        if reader is not None:
            check_alike(await reader.identity.remote(), host_cache_of(self.engine.tables[0]).identity)

    @property
    def engine(self) -> Engine:
        return self.service.models.find(None).llm.engine

    def digest(self) -> bytes:
        """A digest of all that an answer depends on beside the request."""
        options, settings = options_of(self.plan.models[0][0], **self.plan.options), self.plan.settings
        own = identity(folder_of(options), self.engine.config, options)
        what = (own, self.plan.models, settings.version, settings.formats, self.engine.max_len)
        return hashlib.blake2b(repr(what).encode(), digest_size=16).digest()

    async def answer(self, call: ForwardedRequest) -> AsyncIterator[ResponseStart | ResponsePiece]:
        """The response to a request; one that another replica can answer ends with `ReplicaFailed`."""
        try:
            async for message in ReplicaConnection(call, self.identity).messages(self.app):
                yield message
        except Exception as error:
            raise ReplicaFailed(as_http(error).message) from None

    async def fetch_pages(self, llm: AsyncLLM, ask: Ask) -> None:
        """Fetch a prompt's pages from a prefill replica, unless one has just failed."""
        if time.monotonic() >= self.resumes:
            await bring(llm, ask, self.read_elsewhere)

    async def read_elsewhere(self, ask: Ask) -> Handover:
        """Compute a prompt on a prefill replica; after a failure prompts are computed here for a while."""
        prefix = of_tokens(ask.tokens, ask.terms.cache_salt)
        try:
            async with asyncio.timeout(READING):
                return await self.reader.read.remote(PromptToRead(prefix, ask.tokens, ask.terms))
        except Exception:
            self.resumes = time.monotonic() + PAUSE
            raise

    async def metrics(self) -> list[tuple[dict[str, str], Family]]:
        """The metrics of the engines and of the application, labelled by replica and model."""
        engines = [(model.name, model.llm.metrics) for model in self.service.models.ready()]
        own = {"replica": own_name()}
        found = [(own | {"model_name": name}, family) for name, metrics in engines for family in metrics.families()]
        return found + [(own, family) for family in self.service.http_metrics.families()]

    async def check_health(self) -> None:
        """Serve asks now and then, and starts another replica in place of one that raises."""
        for model in self.service.models.ready():
            if (state := model_state(self.service, model)) in ("failed", "stalled"):
                raise ReplicaFailed(f"model {model.name} has {state}")

    def __del__(self):
        """Serve calls this when the last answer is out."""
        if hasattr(self, "heart"):
            self.heart.cancel()
            self.service.close()


@dataclass(frozen=True)
class PromptToRead:
    """A prompt for a prefill replica to compute."""

    prefix: tuple[bytes, ...]
    tokens: list[int]
    terms: Terms


class PrefillReplica:
    """Computes prompts for the replicas that generate answers."""

    async def __init__(self, plan: DeploymentPlan):
        setup_logging(plan.log_json, plan.log_level)
        options = options_of(plan.models[0][0], **plan.chosen)
        self.llm, self.ids = AsyncLLM(engine=await asyncio.to_thread(make_engine, options)), itertools.count()

    async def identity(self) -> bytes:
        return host_cache_of(self.llm.engine.tables[0]).identity

    async def read(self, prompt: PromptToRead) -> Handover:
        ask = Ask(prompt.tokens, SamplingParams(), None, prompt.terms)
        handover = await read(self.llm, f"read-{next(self.ids)}", ask)
        return await asyncio.to_thread(handover.on_host)

    async def metrics(self) -> list[tuple[dict[str, str], Family]]:
        own = {"replica": own_name(), "model_name": "reader"}
        return [(own, family) for family in self.llm.metrics.families()]

    async def check_health(self) -> None:
        if self.llm.thread.failure is not None:
            raise ReplicaFailed("the engine has failed")

    def __del__(self):
        if hasattr(self, "llm"):
            self.llm.close()


def own_name() -> str:
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id
