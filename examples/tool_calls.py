"""Tool calling over HTTP with the OpenAI client. Needs `pip install openai` and a server with a
model that supports tools:

    quire serve Qwen/Qwen3-0.6B
    python examples/tool_calls.py [http://127.0.0.1:8000/v1]

Prints each call with the function's result, and then the model's final answer.
"""

import json
import sys

from openai import OpenAI


def weather(city: str) -> str:
    """Stands in for a real weather service."""
    return f"12 degrees and rain in {city}"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Today's weather", "parameters": SCHEMA},
    }
]

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none"
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Rome, and in Oslo?"}]

while True:
    answer = (
        client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        .choices[0]
        .message
    )
    if not answer.tool_calls:
        break
    messages.append(answer.to_dict())
    for call in answer.tool_calls:
        tool_result = weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {tool_result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": tool_result})
print(answer.content)
