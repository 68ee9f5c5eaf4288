# /// script
# dependencies = ["llama-index-core>=0.14,<1", "llama-index-llms-openai-like>=0.5,<1"]
# ///
"""LlamaIndex: answers, streams, and an agent with a tool."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

scripted, bundled = sys.argv[1:]
EXPECTED_ANSWER = "You said: hello – 世界 👩‍🚀"


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


def model(url: str) -> OpenAILike:
    return OpenAILike(
        model="quill",
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=1024,
    )


messages = [ChatMessage(role="user", content="hello")]
assert model(scripted).chat(messages).message.content == EXPECTED_ANSWER
assert (
    "".join(chunk.delta or "" for chunk in model(scripted).stream_chat(messages)) == EXPECTED_ANSWER
)
assert (
    model(bundled).chat([ChatMessage(role="user", content="Sort: 39 84 36 90")]).message.content
    == "36 39 84 90"
)


async def run_agent() -> str:
    agent = FunctionAgent(tools=[weather], llm=model(scripted))
    return str(await agent.run("weather in Rome and in Paris"))


assert (answer := asyncio.run(run_agent())) == "It is sun in Rome and sun in Paris.", answer
