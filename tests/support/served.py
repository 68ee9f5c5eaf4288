"""A server in a thread for tests over a socket, and an engine whose answers are scripted."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.ops.sampling import MAX_LOGPROBS, MAX_WANTED, Sampled
from quire.scripts.bench.host import pretended_engine
from quire.serving.engine.step_result import InFlightStep, SampledTokens, StepResult
from quire.serving.http import server
from quire.serving.http.models import Model, Models
from quire.serving.http.service import Service
from quire.serving.http.settings import Formats, ServerSettings

# A conversation as text that a script can parse: tools, then turns, as in Hermes and Qwen.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORMATS = Formats("hermes", "qwen3", chat_template=TEMPLATE)


class Script:
    """A fake device that samples the tokens of `say(prompt text)`, and then the end token."""

    def __init__(self, engine: Any, say: Callable[[str], str]):
        self.engine = engine
        self.say = say
        self.lines: dict[Any, list[int]] = {}
        self.step_seconds = 0.0
        self.hold = threading.Event()  # cleared: the device hangs
        self.hold.set()
        self.fail_next = 0  # steps that raise
        self.steps = 0

    def launch(self, plan, moves):
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the device is not well")
        return InFlightStep(plan, None, None, None, [])

    def collect(self, step):
        self.hold.wait()
        time.sleep(self.step_seconds)
        self.steps += 1
        items = step.plan.items
        rows = sum(len(item.scored_positions) + item.num_samples for item in items)
        tokens = np.zeros(rows, np.int32)
        outputs = []
        row = 0
        best = np.tile(np.arange(MAX_LOGPROBS, dtype=np.int32), (rows, 1))
        for item in items:
            for position in item.scored_positions:
                tokens[row] = item.seq.tokens[position + 1]
                row += 1
            if item.num_samples:
                tokens[row] = self.next_token(item.seq)
                row += item.num_samples
        ranks = np.ones(rows, np.int32)
        ok = np.ones(rows, bool)
        hidden = np.zeros((rows, 8), np.float32)
        logprobs = np.full(rows, -0.5, np.float32)
        top = np.full((rows, MAX_LOGPROBS), -1.5, np.float32)
        listed_logprobs = np.tile(-np.arange(1, MAX_WANTED + 1, dtype=np.float32), (rows, 1))
        sampled = Sampled(tokens, logprobs, ranks, best, top, listed_logprobs, ok)
        row = 0
        for item in items:
            count = len(item.scored_positions) + item.num_samples
            if count:
                outputs.append(
                    SampledTokens(
                        item, row, 0, [int(tokens[row + count - 1])] if item.num_samples else []
                    )
                )
                row += count
        return StepResult(step, outputs, sampled, hidden)

    def next_token(self, seq) -> int:
        tokenizer = self.engine.tokenizer
        if seq not in self.lines:
            prompt = tokenizer.decode(seq.tokens[: seq.num_prompt], skip_special_tokens=False)
            text = tokenizer.encode(self.say(prompt), add_special_tokens=False)
            self.lines[seq] = [*text, *tokenizer.eos_token_ids]
        answer = self.lines[seq]
        token = answer[min(seq.num_output, len(answer) - 1)]  # a step in flight goes beyond the end
        if seq.num_output + 1 in (len(answer), seq.max_tokens):
            del self.lines[seq]
        return token


def scripted(
    say: Callable[[str], str], num_seqs: int = 16, longest: int = 1000
) -> tuple[Any, Script]:
    """An engine with a scripted device."""
    engine = pretended_engine(num_seqs, longest)
    script = Script(engine, say)
    engine.runner.launch, engine.runner.collect = script.launch, script.collect
    engine.runner.load_weights = lambda: None  # there are no weights
    return engine, script


def model_of(engine: Any, *names: str) -> Model:
    return Model(names or ("quill",), lambda: engine)


@contextmanager
def served(*models: Model, **chosen: Any) -> Iterator[Any]:
    """Run a server in a thread; yields its state (`url`, `service`, `loop`). It drains at the end."""
    settings = ServerSettings(**{"port": 0, "shutdown_grace": 30.0, **chosen})
    started = threading.Event()
    state = SimpleNamespace(url="", service=None, loop=None, error=None)

    async def run() -> None:
        state.loop = asyncio.get_running_loop()
        state.service = Service(Models(models, settings.max_loaded), settings)

        def ready(address: str) -> None:
            state.url = address
            started.set()

        await server.serve(state.service, ready)

    def main() -> None:
        try:
            server.run(run())
        except BaseException as error:
            state.error = error
        finally:
            started.set()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert started.wait(300) and state.error is None, state.error
    state.thread = thread
    try:
        yield state
    finally:
        if thread.is_alive():
            state.loop.call_soon_threadsafe(state.service.stop)
            thread.join(120)
        assert not thread.is_alive(), "the server did not end"
        assert state.error is None, state.error
