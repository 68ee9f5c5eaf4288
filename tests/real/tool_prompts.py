"""Fifty prompts that need a tool call and fifty that ask for JSON, each with some tools.

`python tests/real/tool_prompts.py MODEL...` prints, for each model and parser, how many are
answered by a call of a function that fits the prompt, how many by another call, and how many by
text.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import jsonschema

from quire import LLM, SamplingParams
from quire.serving import parsing
from quire.serving.protocol.answers.choices import collect


def make_tool(name: str, description: str, required: str = "", **properties: Any) -> dict[str, Any]:
    """Makes a tool. A property is given as the name of its type, a list of values or a schema."""
    schemas = {
        key: {"type": schema}
        if isinstance(schema, str)
        else {"enum": schema}
        if isinstance(schema, list)
        else schema
        for key, schema in properties.items()
    }
    parameters = {"type": "object", "properties": schemas, "required": required.split()}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = {
    "weather": [
        make_tool(
            "get_weather",
            "The weather of a city now.",
            "city",
            city="string",
            unit=["celsius", "fahrenheit"],
        ),
        make_tool(
            "get_forecast",
            "The forecast of a city for some days.",
            "city days",
            city="string",
            days="integer",
        ),
    ],
    "files": [
        make_tool("read_file", "Read a file of the project.", "path", path="string"),
        make_tool(
            "write_file",
            "Write a file of the project.",
            "path content",
            path="string",
            content="string",
        ),
        make_tool("list_files", "List the files in a folder.", "folder", folder="string"),
        make_tool("run_command", "Run a command in a shell.", "command", command="string"),
    ],
    "mail": [
        make_tool(
            "send_email",
            "Send an email.",
            "to subject body",
            to="string",
            subject="string",
            body="string",
        ),
        make_tool("search_email", "Search the inbox.", "query", query="string", limit="integer"),
        make_tool(
            "create_event",
            "Put an event into the calendar.",
            "title date",
            title="string",
            date="string",
            time="string",
        ),
    ],
    "shop": [
        make_tool(
            "search_products",
            "Search the shop.",
            "query",
            query="string",
            max_price="number",
            sort=["price", "rating"],
        ),
        make_tool(
            "add_to_cart",
            "Put a product into the cart.",
            "product_id quantity",
            product_id="integer",
            quantity="integer",
        ),
        make_tool("order_status", "The status of an order.", "order_id", order_id="string"),
    ],
    "math": [
        make_tool(
            "calculate", "Evaluate an arithmetic expression.", "expression", expression="string"
        ),
        make_tool(
            "convert_units",
            "Convert a value between units.",
            "value source target",
            value="number",
            source="string",
            target="string",
        ),
        make_tool("current_time", "The time in a time zone.", "timezone", timezone="string"),
    ],
}
# (prompt, function to call), by tools
CALL_PROMPTS: dict[str, list[tuple[str, str]]] = {
    "weather": [
        ("What is the weather in Paris right now?", "get_weather"),
        ("How warm is it in Bern at the moment? Use celsius.", "get_weather"),
        ("Will it rain in London in the next 3 days?", "get_forecast"),
        ("Give me the 5 day forecast for Tokyo.", "get_forecast"),
        ("Tell me the current temperature in New York in fahrenheit.", "get_weather"),
        ("I am flying to Oslo. What is the weather there now?", "get_weather"),
        ("Forecast for Berlin for a week, please.", "get_forecast"),
        ("Is it sunny in Madrid today?", "get_weather"),
        ("Check the weather in Sydney.", "get_weather"),
        ("Show the forecast of Rome for 2 days.", "get_forecast"),
    ],
    "files": [
        ("Show me what is in README.md.", "read_file"),
        ("List the files in the folder src.", "list_files"),
        ("Run the tests with pytest.", "run_command"),
        ("Create a file hello.py which prints hello world.", "write_file"),
        ("Open the file config/settings.yaml and tell me the port.", "read_file"),
        ("Which files are in tests?", "list_files"),
        ("Use git status to see what has changed.", "run_command"),
        ("Save the text 'to do: buy milk' as notes.txt.", "write_file"),
        ("What does main.py do? Read it first.", "read_file"),
        ("Install the package requests with pip.", "run_command"),
    ],
    "mail": [
        (
            (
                "Send an email to anna@example.com with the subject Lunch and the text 'Are you "
                "free at noon?'."
            ),
            "send_email",
        ),
        ("Search my inbox for the invoice of March.", "search_email"),
        ("Put a dentist appointment into my calendar on 2026-05-04 at 09:30.", "create_event"),
        ("Find the last 3 emails about the project Apollo.", "search_email"),
        ("Write to bob@example.com that the meeting is moved to Friday.", "send_email"),
        ("Add the event 'Team dinner' on 2026-06-12.", "create_event"),
        ("Look for emails from my bank.", "search_email"),
        ("Email support@example.com: my order 1234 has not arrived.", "send_email"),
        ("Remind me of Julia's birthday on 2026-08-01 in the calendar.", "create_event"),
        ("Search for messages that mention 'contract'.", "search_email"),
    ],
    "shop": [
        ("Find me running shoes under 80 dollars.", "search_products"),
        ("Add two pieces of product 4711 to my cart.", "add_to_cart"),
        ("Where is my order A-1009?", "order_status"),
        ("Show the best rated headphones.", "search_products"),
        ("Put one item with the id 88 into the cart.", "add_to_cart"),
        ("Has the order 55X been shipped?", "order_status"),
        ("Search for a cheap desk lamp, sorted by price.", "search_products"),
        ("I want 5 of product 310.", "add_to_cart"),
        ("Check the status of order B77.", "order_status"),
        ("Look for a red umbrella.", "search_products"),
    ],
    "math": [
        ("What is 1234 * 5678? Use the tool.", "calculate"),
        ("Convert 10 miles to kilometers.", "convert_units"),
        ("What time is it in Asia/Tokyo?", "current_time"),
        ("Calculate (17 + 4) / 3.", "calculate"),
        ("How many pounds are 75 kilograms?", "convert_units"),
        ("Tell me the current time in America/New_York.", "current_time"),
        ("Compute 2 to the power of 20.", "calculate"),
        ("Convert 98.6 fahrenheit to celsius.", "convert_units"),
        ("What is the time in Europe/Berlin now?", "current_time"),
        ("Evaluate 3.5 * (2 + 8).", "calculate"),
    ],
}
JSON_PROMPTS: dict[str, list[str]] = {  # prompts that ask for JSON and no call, by tools
    "weather": [
        "Write a JSON object that describes a person with name, age and hobbies.",
        "Give me an example of a JSON array of three cities with their countries.",
        'Reply with this JSON and nothing else: {"status": "ok"}',
        "Write a JSON schema of a person with a name and an age.",
        "Make a JSON object with the seasons of the year and a sentence about each.",
        "As JSON: the capital of France with the key capital.",
        "Write the planets of the solar system as a JSON list.",
        "Show me how a nested JSON object looks.",
        "Write a JSON object with a name and arguments of a debate about city life.",
        "Translate 'good morning' into French and Spanish, as a JSON object by language.",
    ],
    "files": [
        "Write an example of a package.json for a small project called demo.",
        "Show an example of a tsconfig.json.",
        'Convert this YAML to JSON: "name: demo\\nversion: 1"',
        "Give me a JSON object with the keys id, title and done for a to-do item.",
        "What does a .eslintrc.json look like? Show a short one.",
        "Write a JSON list of the numbers 1 to 5.",
        "Explain JSON with a short example.",
        "Write a JSON configuration for a logger with level and format.",
        "Show a JSON object that describes a command line tool with name and arguments.",
        'Format this JSON nicely: {"a":1,"b":[1,2,3]}',
    ],
    "mail": [
        "Write a JSON object of a contact: name, phone and address. Invent the values.",
        "Give me three made-up users as a JSON array with id, name and role.",
        (
            "Which HTTP status codes are there for errors? Answer as a JSON object of code and "
            "meaning."
        ),
        "Write a JSON object for a book with title, author and year.",
        "Summarise as JSON with the keys topic and mood: 'The concert last night was wonderful.'",
        "Extract the names as a JSON list: 'Tom met Lisa and Paul in Rome.'",
        "Classify this as positive or negative, as JSON with the key label: 'I hate waiting.'",
        "Give a JSON example with a boolean, a number and null.",
        "Write JSON for a recipe of pancakes with ingredients and steps.",
        "Make a JSON quiz question with four options and the answer.",
    ],
    "shop": [
        "Write a JSON object for a fictional product with name, price and tags. Do not search.",
        "Show a JSON example of an invoice with two lines.",
        "As JSON, list the days of the week.",
        "Write a JSON object with the primary colours and their hex codes.",
        "Give me a JSON array with two fictional reviews: stars and text.",
        "Write a JSON document that describes a chess position in FEN with the key fen.",
        "Answer as JSON with the key answer: is the earth flat?",
        "Write a JSON object that maps A, B and C to their position in the alphabet.",
        (
            "Give a JSON object of a function in a programming language: its name, and its "
            "arguments as a list."
        ),
        "Show the JSON of a GitHub user with login and id. Invent it.",
    ],
    "math": [
        "Write the first five prime numbers as a JSON array.",
        "Show a JSON object for a point in space with x, y and z.",
        "Write a JSON schema of a list of integers.",
        "As JSON with the keys question and answer: one easy question about geometry.",
        "Write a JSON object with the constants pi and e.",
        "Give me the Roman numerals from 1 to 5 as a JSON object.",
        "Write a JSON matrix of two rows and two columns.",
        "Describe a triangle as JSON with its sides and its kind.",
        "What are the units of length? Answer as a JSON list.",
        "Write a GeoJSON point for Zurich.",
    ],
}


@dataclass(frozen=True)
class Outcome:
    """An answer and the calls that the parser found in it."""

    tools: str
    prompt: str
    expected_function: str | None
    answer: str
    calls: list[tuple[str, str]]

    @property
    def is_right(self) -> bool:
        """Whether all calls are valid, and the first one calls the expected function."""
        schemas = tool_schemas(self.tools)
        try:
            for name, arguments in self.calls:
                jsonschema.validate(json.loads(arguments), schemas[name])
        except (KeyError, ValueError, jsonschema.ValidationError):
            return False
        return bool(self.calls) and self.calls[0][0] == self.expected_function


def tool_schemas(tools: str) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS[tools]}


def prompts(tools: str) -> list[tuple[str, str | None]]:
    """Returns (prompt, expected function, or None if JSON is asked for) of these tools."""
    return [*CALL_PROMPTS[tools], *((prompt, None) for prompt in JSON_PROMPTS[tools])]


def generate_answers(llm: LLM, tools: str, max_tokens: int = 100) -> list[str]:
    """Returns greedy answers to the prompts of these tools, with special tokens, as calls may have
    some.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, skip_special_tokens=False)
    chats = [[{"role": "user", "content": prompt}] for prompt, _ in prompts(tools)]
    outputs = llm.chat(chats, params, tools=TOOLS[tools])
    return [output.outputs[0].text.removesuffix("<|im_end|>") for output in outputs]


def parse_outcomes(tools: str, texts: list[str], tool_parser: str) -> list[Outcome]:
    parsed_outcomes = []
    for (prompt, expected_function), text in zip(prompts(tools), texts, strict=True):
        parser = parsing.make_parser(tool_parser, None, tool_schemas(tools))
        _, _, calls = collect([*parser.push(text), *parser.finish()])
        parsed_outcomes.append(
            Outcome(
                tools,
                prompt,
                expected_function,
                text,
                [(call.name, call.arguments) for call in calls],
            )
        )
    return parsed_outcomes


def count_outcomes(all_outcomes: list[Outcome]) -> dict[str, int]:
    """Counts answers to call prompts with the right call, another call or text, and answers to JSON
    prompts with a call ("false").
    """
    call_outcomes = [outcome for outcome in all_outcomes if outcome.expected_function]
    return {
        "right": sum(outcome.is_right for outcome in call_outcomes),
        "other": sum(bool(outcome.calls) and not outcome.is_right for outcome in call_outcomes),
        "text": sum(not outcome.calls for outcome in call_outcomes),
        "false": sum(
            bool(outcome.calls) for outcome in all_outcomes if not new_outcome.expected_function
        ),
    }


if __name__ == "__main__":
    for model in sys.argv[1:]:
        llm = LLM(model, max_model_len=1024, max_num_seqs=10)
        all_outcomes: list[Outcome] = []
        for tools in TOOLS:
            new_outcomes = parse_outcomes(tools, generate_answers(llm, tools), "hermes")
            all_outcomes += new_outcomes
            for new_outcome in new_outcomes:
                print(
                    json.dumps(
                        [
                            new_outcome.tools,
                            new_outcome.prompt,
                            new_outcome.expected_function,
                            new_outcome.answer,
                            new_outcome.calls,
                        ]
                    ),
                    flush=True,
                )
        print(model, json.dumps(count_outcomes(all_outcomes)), flush=True)
        del llm
