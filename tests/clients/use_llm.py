# /// script
# dependencies = ["llm>=0.27,<1"]
# ///
"""Simon Willison's `llm` command: models in YAML; answers, streams, a tool and a schema."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

scripted, bundled = sys.argv[1:]
EXPECTED_ANSWER = "You said: hello – 世界 👩‍🚀"
MODELS = f"""
- model_id: quill
  model_name: quill
  api_base: {scripted}/v1
  supports_tools: true
- model_id: sure
  model_name: quill
  api_base: {bundled}/v1
  supports_schema: true
"""
WEATHER = (
    'def weather(city: str) -> str:\n    "The weather of a city."\n    return f"sun in {city}"'
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "job": {"enum": ["painter", "baker"]},
        "city": {"type": "string"},
    },
    "required": ["name", "job", "city"],
    "additionalProperties": False,
}

with tempfile.TemporaryDirectory() as home:
    (Path(home) / "extra-openai-models.yaml").write_text(MODELS)

    def llm(*arguments: str) -> str:
        process = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env=os.environ | {"LLM_USER_PATH": home, "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.rstrip("\n")

    assert (
        llm("-m", "quill", "hello") == llm("-m", "quill", "hello", "--no-stream") == EXPECTED_ANSWER
    )
    output = llm("-m", "quill", "--functions", WEATHER, "weather in Rome and in Paris")
    assert output.endswith("It is sun in Rome and sun in Paris."), output
    prompt = "Give JSON for: David is a painter in Lagos"
    output = llm("-m", "sure", "-o", "temperature", "0", "--schema", json.dumps(PERSON), prompt)
    assert json.loads(output) == {"name": "David", "job": "painter", "city": "Lagos"}, output
