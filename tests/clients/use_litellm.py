# /// script
# dependencies = ["litellm>=1.80,<2"]
# ///
"""litellm, which calls the server as OpenAI's, vLLM's and Anthropic's."""

import json
import sys

import litellm

scripted, bundled = sys.argv[1:]
HELLO = [{"role": "user", "content": "hello"}]
EXPECTED_ANSWER = "You said: hello – 世界 👩‍🚀"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

for model, base in (
    ("openai/quill", f"{scripted}/v1"),
    ("hosted_vllm/quill", f"{scripted}/v1"),
    ("anthropic/quill", scripted),
):
    endpoint = {"model": model, "api_base": base, "api_key": "none"}
    completion = litellm.completion(messages=HELLO, max_tokens=100, **endpoint)
    assert completion.choices[0].message.content == EXPECTED_ANSWER, completion
    assert (
        completion.choices[0].finish_reason == "stop" and completion.usage.completion_tokens > 0
    ), completion

    chunks = litellm.completion(messages=HELLO, max_tokens=100, stream=True, **endpoint)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == EXPECTED_ANSWER, (
        model
    )

    messages = [{"role": "user", "content": "weather in Rome"}]
    message = (
        litellm.completion(messages=messages, tools=[WEATHER], max_tokens=100, **endpoint)
        .choices[0]
        .message
    )
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}, message
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    last = litellm.completion(messages=messages, tools=[WEATHER], max_tokens=100, **endpoint)
    assert last.choices[0].message.content == "It is sun.", last

person = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "job": {"enum": ["painter", "baker"]},
        "city": {"type": "string"},
    },
    "required": ["name", "job", "city"],
    "additionalProperties": False,
}
completion = litellm.completion(
    model="openai/quill",
    api_base=f"{bundled}/v1",
    api_key="none",
    temperature=0,
    messages=[{"role": "user", "content": "Give JSON for: David is a painter in Lagos"}],
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": person, "strict": True},
    },
)
assert json.loads(completion.choices[0].message.content) == {
    "name": "David",
    "job": "painter",
    "city": "Lagos",
}, completion
