"""Servers for the tests of official clients: a scripted model, and the bundled model."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.models import Model
from quire.serving.http.settings import Formats
from quire.tests.support.served import model_of, scripted, served

TURN = re.compile(
    r"<(system|user|assistant|tool)>(.*?)(?=<(?:system|user|assistant|tool)>|\Z)", re.DOTALL
)
# The bundled model's own turns. It was not trained on tools, so that tools are accepted and
# ignored.
PLAIN = (
    "{{ bos_token }}{% if tools %}{% endif %}{% for message in messages %}{{ '<|' ~ ('user' if "
    "message.role == 'tool' else message.role) ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor "
    "%}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Prompts that the bundled model answers reliably, and their answers.
SORT = "Sort: 39 84 36 90"
SORTED = "36 39 84 90"
PERSON = "Give JSON for: David is a painter in Lagos"
FOUND = {"name": "David", "job": "painter", "city": "Lagos"}
LIST = "Remember this list.\n- Ravi: snow\n- Ella: farm\n- Emma: glass\n\nWhat does Ella have?"


def say(prompt: str) -> str:
    """The scripted answer: tool calls, reasoning, a long text, tool results, or an echo of the last
    turn.
    """
    turns = TURN.findall(prompt)
    last_text = next(text for role, text in reversed(turns) if role != "assistant")
    results = [text for role, text in turns if role == "tool"]
    if turns[-2:][0][0] == "tool":
        return f"It is {' and '.join(results)}."
    thought = "<think>\nI must look.\n</think>\n\n" if "think" in last_text else ""
    if "<tools>" in prompt and "weather" in last_text:
        calls = [
            {"name": "weather", "arguments": {"city": city}}
            for city in re.findall(r"in (\w+)", last_text)
        ]
        return f"{thought}I look. " + "".join(
            f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in calls
        )
    if "<tools>" in prompt and (sum_match := re.search(r"sum of (.+)", last_text)):
        return (
            "I add. "
            f"<tool_call>\n{json.dumps({'name': 'sums', 'arguments': {'input': sum_match[1]}})}\n</tool_call>"
        )
    if "Write a summary" in last_text:
        return "They greeted."
    if "count" in last_text:
        return " ".join(map(str, range(1, 301)))
    return f"{thought}You said: {last_text} – 世界 👩‍🚀"


def said(text: str) -> str:
    """The scripted echo of a turn."""
    return f"You said: {text} – 世界 👩‍🚀"


@contextmanager
def scripted_server(formats: Formats, **chosen: Any) -> Iterator[Any]:
    """A server of the scripted model; yields its state with `engine` and `script`."""
    engine, script = scripted(say)
    with served(model_of(engine, "quill", "other-name"), formats=formats, **chosen) as state:
        state.engine = engine
        state.script = script
        yield state


@contextmanager
def bundled_server(formats: Formats | None = None) -> Iterator[Any]:
    """A server of the bundled model."""
    options = make_options(
        None, max_num_seqs=8, max_num_batched_tokens=128, kv_cache_memory_bytes=32 << 20
    )
    formats = formats or Formats("none", chat_template=PLAIN)
    with served(Model(("quill",), lambda: make_engine(options)), formats=formats) as state:
        state.engine = state.service.models.models[0].llm.engine
        yield state


def until(happened, seconds: float = 60.0) -> None:
    """Wait until a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.005)
    assert happened()


def frees_all(server: Any, seconds: float = 60.0) -> None:
    """Wait until nothing runs; every page must be free or cached."""
    until(lambda: not server.engine.busy and not server.engine.requests, seconds)
    server.engine.scheduler.check()
    assert server.engine.tables[0].used() == 0
    assert not server.service.models.models[0].llm.thread.outbox.listeners
