"""What the tests of official clients talk with: a model that follows a script, and the bundled
one.
"""

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
# The bundled model's own turns. It was not taught tools: they have a place here, but tell it
# nothing.
PLAIN = (
    "{{ bos_token }}{% if tools %}{% endif %}{% for message in messages %}{{ '<|' ~ ('user' if "
    "message.role == 'tool' else message.role) ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor "
    "%}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# What the bundled model answers, being sure of it.
SORT = "Sort: 39 84 36 90"
SORTED = "36 39 84 90"
PERSON = "Give JSON for: David is a painter in Lagos"
FOUND = {"name": "David", "job": "painter", "city": "Lagos"}
LIST = "Remember this list.\n- Ravi: snow\n- Ella: farm\n- Emma: glass\n\nWhat does Ella have?"


def say(prompt: str) -> str:
    """What the last turn asks for: calls, thoughts, many words, what tools said, or the turn itself
    again.
    """
    turns = TURN.findall(prompt)
    asked = next(text for role, text in reversed(turns) if role != "assistant")
    results = [text for role, text in turns if role == "tool"]
    if turns[-2:][0][0] == "tool":
        return f"It is {' and '.join(results)}."
    thought = "<think>\nI must look.\n</think>\n\n" if "think" in asked else ""
    if "<tools>" in prompt and "weather" in asked:
        calls = [
            {"name": "weather", "arguments": {"city": city}}
            for city in re.findall(r"in (\w+)", asked)
        ]
        return f"{thought}I look. " + "".join(
            f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in calls
        )
    if "<tools>" in prompt and (asked_for := re.search(r"sum of (.+)", asked)):
        return (
            "I add. "
            f"<tool_call>\n{json.dumps({'name': 'sums', 'arguments': {'input': asked_for[1]}})}\n</tool_call>"
        )
    if "Write a summary" in asked:
        return "They greeted."
    if "count" in asked:
        return " ".join(map(str, range(1, 301)))
    return f"{thought}You said: {asked} – 世界 👩‍🚀"


def said(text: str) -> str:
    """The answer to a turn that asks for nothing else."""
    return f"You said: {text} – 世界 👩‍🚀"


@contextmanager
def scripted_server(formats: Formats, **chosen: Any) -> Iterator[Any]:
    """The server of `served`, with its engine and its script."""
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
    """Wait for something that must happen."""
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.005)
    assert happened()


def frees_all(server: Any, seconds: float = 60.0) -> None:
    """Soon nothing runs, and every page is free or kept for others."""
    until(lambda: not server.engine.busy and not server.engine.requests, seconds)
    server.engine.scheduler.check()
    assert server.engine.tables[0].used() == 0
    assert not server.service.models.models[0].llm.thread.outbox.listeners
