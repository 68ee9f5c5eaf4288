"""Structured output: answers that match a pydantic class. Needs `pip install pydantic`.

Prints a person and a shopping list as Python objects. Answers are always valid, because each token
is sampled only from those that the JSON schema allows next.

    python examples/json_answers.py [MODEL]      # without MODEL: the bundled one
"""

import sys
from typing import Literal

from pydantic import BaseModel, Field

from quire import LLM, SamplingParams, StructuredOutputsParams


class Person(BaseModel):
    name: str
    age: int
    city: str


class Shopping(BaseModel):
    shop: Literal["market", "bakery"]
    items: list[Literal["bread", "apples", "milk"]] = Field(max_length=3)


def ask(llm: LLM, question: str, form: type[BaseModel]) -> BaseModel:
    shape = StructuredOutputsParams(json=form.model_json_schema())
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=shape)
    (result,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    return form.model_validate_json(result.outputs[0].text)


llm = LLM(*sys.argv[1:])
print(repr(ask(llm, "Give JSON for: Anna is 31 and lives in Oslo", Person)))
print(repr(ask(llm, "What shall I buy?", Shopping)))
