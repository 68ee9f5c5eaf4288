# /// script
# dependencies = ["instructor>=1.12,<2"]
# ///
"""instructor: an object of a class in each of its modes, complete and partial."""

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


request = {
    "model": "quill",
    "temperature": 0,
    "max_retries": 0,
    "messages": [{"role": "user", "content": "Give JSON for: David is a painter in Lagos"}],
}
DAVID = {"name": "David", "job": "painter", "city": "Lagos"}
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=f"{bundled}/v1", api_key="none"), mode=mode)
    person = client.chat.completions.create(response_model=Person, **request)
    assert person.model_dump() == DAVID, (mode, person)
    *partial_people, last = client.chat.completions.create_partial(response_model=Person, **request)
    assert len(partial_people) > 1 and last.model_dump() == DAVID, (mode, last)
