# /// script
# dependencies = ["pydantic-ai-slim[openai]>=1.20,<3"]
# ///
"""Pydantic AI: answers, streams, a tool, and structured output."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

scripted, bundled = sys.argv[1:]
EXPECTED_ANSWER = "You said: hello – 世界 👩‍🚀"


class Person(BaseModel):
    name: str
    job: Literal["painter", "baker"]
    city: str


def provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


for model_class in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(model_class("quill", provider=provider(scripted)))

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sun in {city}"

    assert agent.run_sync("hello").output == EXPECTED_ANSWER
    result = agent.run_sync("weather in Rome and in Paris")
    assert result.output == "It is sun in Rome and sun in Paris.", result
    assert result.usage.requests == 2, result.usage

    async def streamed(agent: Agent = agent) -> str:
        async with agent.run_stream("hello") as stream:
            return [text async for text in stream.stream_text()][-1]

    assert asyncio.run(streamed()) == EXPECTED_ANSWER

for output in (NativeOutput(Person), ToolOutput(Person)):
    agent = Agent(
        OpenAIChatModel("quill", provider=provider(bundled)),
        output_type=output,
        model_settings={"temperature": 0},
    )
    result = agent.run_sync("Give JSON for: David is a painter in Lagos").output
    assert result == Person(name="David", job="painter", city="Lagos"), (output, result)
