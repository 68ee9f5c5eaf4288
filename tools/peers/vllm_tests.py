"""Run vLLM's server tests unchanged against `quire serve`: `python -m tools.peers.vllm_tests
SOURCE`.

SOURCE is a folder with vLLM's source, such as its unpacked sdist. Needs pytest-asyncio,
transformers and the other imports of the tests. The bundled model is served under the name that a
test requests. Imports of vLLM's own code are replaced by stubs; a test that uses one is skipped.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.scripts.tables import table

FILES = (  # tests of text generation models, under tests/entrypoints
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/models/test_models.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_return_token_ids.py",
    "openai/test_chunked_prompt.py",
    "openai/responses/test_simple.py",
    "anthropic/test_messages.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
)
BOTH = (  # flags that both vLLM and Quire have
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--no-enable-prefix-caching",
    "--max-num-seqs",
    "--tool-call-parser",
    "--reasoning-parser",
    "--api-key",
    "--enable-tokenizer-info-endpoint",
    "--max-logprobs",
    "--enable-force-include-usage",
    "--enable-per-request-metrics",
)
CHOSEN = "not load_prompt_embeds"  # excludes tests that call vLLM's functions with mocks
KEY = "token-abc123"
TURNS = (  # the bundled model's chat template, plus tools, on which it was not trained
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Random weights rarely generate EOS, which the tests rely on.
SERVE = (sys.executable, "-m", "quire", "serve", "--port", "0", "--load-format", "dummy")


class VllmStub(type):
    """A stub for a name in vLLM's code that can be imported, used in annotations and caught."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"needs vLLM's own {cls.__name__}")

    def __add__(cls, operand: Any) -> Any:
        return cls()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stub(f"{cls.__name__}.{name}")


def make_stub(name: str) -> Any:
    return VllmStub(name, (Exception,), {})


class Substitutes(Loader, MetaPathFinder):
    """An importer that replaces vLLM's modules and the helpers of its tests."""

    def __init__(self, replacements: dict[str, dict[str, Any]]):
        self.given = replacements

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.given or fullname.partition(".")[0] == "vllm":
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module).update(self.given.get(name, {}))
        vars(module)["__getattr__"] = lambda attribute: (
            make_stub(f"{name}.{attribute}") if attribute[:2] != "__" else None
        )


def parse_flags(args: Sequence[str]) -> dict[str, list[str]]:
    """The values of each flag in a command line."""
    values_by_flag: dict[str, list[str]] = {}
    values: list[str] = []
    for word in args:
        if word.startswith("--"):
            name, is_given, value = word.partition("=")
            values = values_by_flag[name] = [value] if is_given else []
        else:
            values.append(word)
    return values_by_flag


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer with which the tests count tokens."""
    from quire.model.checkpoint import hub

    return import_module("transformers").AutoTokenizer.from_pretrained(hub.resolve(None))


class RemoteOpenAIServer:
    """A stand-in for vLLM's test helper: runs `quire serve` with the flags that Quire supports."""

    DUMMY_API_KEY = KEY

    def __init__(
        self, model: str, args: Sequence[str], env_dict: dict[str, str] | None = None, **_: Any
    ):
        flags_given = parse_flags(args)
        flags = [
            word for flag, values in flags_given.items() if flag in BOTH for word in (flag, *values)
        ]
        names = flags_given.get("--served-model-name", [model])
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            flags += ["--api-key", key]
        [longest] = flags_given.get("--max-model-len", ["8192"])
        flags += [
            "--max-model-len",
            longest,
            "--hf-overrides",
            f'{{"max_position_embeddings": {longest}}}',
        ]
        self.folder = tempfile.TemporaryDirectory()
        template = Path(self.folder.name) / "turns.jinja"
        template.write_text(TURNS)
        self.process = subprocess.Popen(
            [*SERVE, "--chat-template", str(template), *flags, "--served-model-name", *names],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines = self.process.stderr
        assert lines is not None
        ready = next((line for line in lines if line.startswith("ready: ")), None)
        if ready is None:
            pytest.fail("the server did not start")
        # Drains stderr, so that the server does not block.
        threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()
        self.url_root = ready.removeprefix("ready: ").strip()
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.folder.cleanup()

    def url_for(self, *segments: str) -> str:
        return "/".join([self.url_root, *segments])

    def get_client(self, **chosen: Any) -> Any:
        from openai import OpenAI

        return OpenAI(**self.options(chosen))

    def get_async_client(self, **chosen: Any) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(**self.options(chosen))

    def get_client_anthropic(self, **chosen: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self.options(chosen) | {"base_url": self.url_root})

    def get_async_client_anthropic(self, **chosen: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self.options(chosen) | {"base_url": self.url_root})

    def options(self, chosen: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": self.url_for("v1"),
            "api_key": KEY,
            "max_retries": 0,
            "timeout": 120,
        } | chosen


class Count:
    """A pytest plugin that counts the outcomes of each file's tests."""

    def __init__(self) -> None:
        self.ended: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        file = report.nodeid.partition("::")[0].rpartition("entrypoints/")[2]
        self.ended[file][report.outcome] += 1
        if report.failed:
            self.failed.append((report.nodeid.rpartition("entrypoints/")[2], self.why(report)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.ended[report.nodeid]["not read"] += 1
            self.failed.append((report.nodeid, self.why(report)))

    @staticmethod
    def why(report: Any) -> str:
        crash = getattr(report.longrepr, "reprcrash", None)
        return str(crash.message if crash else report.longrepr).splitlines()[0][:160]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder with vLLM's source")
    parser.add_argument(
        "files",
        nargs="*",
        default=FILES,
        help="test files under tests/entrypoints (default: those for text generation models)",
    )
    parser.add_argument(
        "-k", dest="some", default=CHOSEN, help="expression that selects tests, as in pytest"
    )
    args = parser.parse_args()
    tests = args.source / "tests" / "entrypoints"
    for file in args.files:
        if not (tests / file).is_file():
            parser.error(f"{tests / file} is not there")
    sys.path.insert(0, str(args.source))
    helpers = {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "ROCM_ENV_OVERRIDES": {},
    }
    sys.meta_path.insert(
        0,
        Substitutes({"tests.utils": helpers, "vllm.tokenizers": {"get_tokenizer": get_tokenizer}}),
    )
    count = Count()
    fixtures = [f"-ptests.entrypoints.{name}" for name in ("conftest", "openai.responses.conftest")]
    options = [
        "-q", "--noconftest", "--continue-on-collection-errors", "--tb=no", "--no-header",
        "-pno:cacheprovider", "-oaddopts=", "-k", args.some,
    ]  # fmt: skip
    files = [str(tests / file) for file in args.files]
    pytest.main(
        [*fixtures, *options, f"--rootdir={args.source}", "-c/dev/null", *files], plugins=[count]
    )
    kinds = ("passed", "failed", "skipped", "not read")
    rows = [(file, *(ended[kind] for kind in kinds)) for file, ended in sorted(count.ended.items())]
    rows.append(("all", *(sum(ended[kind] for ended in count.ended.values()) for kind in kinds)))
    print(table(("file", *kinds), rows))
    for name, reason in count.failed:
        print(f"\n{name}\n    {reason}")


if __name__ == "__main__":
    main()
