# /// script
# dependencies = ["llm>=0.27,<1"]
# ///
"""`llm`, Simon Willison's command: a model by a line of YAML; answers, streams, a tool and a
schema.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

scripted, bundled = sys.argv[1:]
SAID = "You said: hello – 世界 👩‍🚀"
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

    def llm(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            env=os.environ | {"LLM_USER_PATH": home, "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n")

    assert llm("-m", "quill", "hello") == llm("-m", "quill", "hello", "--no-stream") == SAID
    found = llm("-m", "quill", "--functions", WEATHER, "weather in Rome and in Paris")
    assert found.endswith("It is sun in Rome and sun in Paris."), found
    asked = "Give JSON for: David is a painter in Lagos"
    found = llm("-m", "sure", "-o", "temperature", "0", "--schema", json.dumps(PERSON), asked)
    assert json.loads(found) == {"name": "David", "job": "painter", "city": "Lagos"}, found
