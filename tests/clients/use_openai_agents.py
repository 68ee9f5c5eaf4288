# /// script
# dependencies = ["openai-agents>=0.6,<1"]
# ///
"""OpenAI's agents SDK: tools and streams, over chat completions and over responses."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

scripted, bundled = sys.argv[1:]
set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


async def run_agents() -> None:
    client = AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none")
    for model_class in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="clerk", model=model_class(model="quill", openai_client=client), tools=[weather]
        )
        result = await Runner.run(agent, "weather in Rome and in Paris")
        assert result.final_output == "It is sun in Rome and sun in Paris.", (
            model_class,
            result.final_output,
        )

        stream = Runner.run_streamed(agent, "hello")
        text = ""
        async for event in stream.stream_events():
            if (
                event.type == "raw_response_event"
                and event.data.type == "response.output_text.delta"
            ):
                text += event.data.delta
        assert text == stream.final_output == "You said: hello – 世界 👩‍🚀", (model_class, text)
    await client.close()


asyncio.run(run_agents())
