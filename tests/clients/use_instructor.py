# /// script
# dependencies = ["instructor>=1.12,<2"]
# ///
"""instructor: an object of a class in each of its modes, whole, in parts, and several."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

scripted, bundled = sys.argv[1:]


class Person(BaseModel):
    name: str
    job: Literal["painter", "baker"]
    city: str


asked = {
    "model": "quill",
    "temperature": 0,
    "max_retries": 0,
    "messages": [{"role": "user", "content": "Give JSON for: David is a painter in Lagos"}],
}
DAVID = {"name": "David", "job": "painter", "city": "Lagos"}
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=f"{bundled}/v1", api_key="none"), mode=mode)
    found = client.chat.completions.create(response_model=Person, **asked)
    assert found.model_dump() == DAVID, (mode, found)
    *parts, last = client.chat.completions.create_partial(response_model=Person, **asked)
    assert len(parts) > 1 and last.model_dump() == DAVID, (mode, last)
