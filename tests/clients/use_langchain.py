# /// script
# dependencies = ["langchain>=1,<2", "langchain-openai>=1,<2"]
# ///
"""LangChain: answers, streams, batches, an agent with a tool, and structured output."""

import sys
from typing import Literal

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

scripted, bundled = sys.argv[1:]


class Person(BaseModel):
    name: str
    job: Literal["painter", "baker"]
    city: str


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


def said(text: str) -> str:
    return f"You said: {text} – 世界 👩‍🚀"


model = ChatOpenAI(model="quill", base_url=f"{scripted}/v1", api_key="none")
result = model.invoke("hello")
assert result.content == said("hello") and result.usage_metadata["output_tokens"] > 0, result
assert "".join(chunk.content for chunk in model.stream("hello")) == said("hello")
assert [message.content for message in model.batch(["a", "b"])] == [said("a"), said("b")]

for over_responses in (False, True):
    chat_model = ChatOpenAI(
        model="quill", base_url=f"{scripted}/v1", api_key="none", use_responses_api=over_responses
    )
    agent = create_agent(chat_model, [weather])
    messages = agent.invoke({"messages": [("user", "weather in Rome and in Paris")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "tool", "ai"], messages
    assert messages[-1].text == "It is sun in Rome and sun in Paris.", messages

bundled_model = ChatOpenAI(model="quill", base_url=f"{bundled}/v1", api_key="none", temperature=0)
for method in ("json_schema", "function_calling"):
    structured_model = bundled_model.with_structured_output(Person, method=method)
    result = structured_model.invoke("Give JSON for: David is a painter in Lagos")
    assert result == Person(name="David", job="painter", city="Lagos"), (method, result)
