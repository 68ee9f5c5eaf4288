"""The command line over a fake engine: parsing, printing, errors, Ctrl-C."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import typer
from rich.console import Console

import quire
from quire.__main__ import COMMANDS, app, main
from quire.model.config import ModelError
from quire.scripts import chat, collect_env, generate, sizes, terminal
from quire.scripts.options import ADAPTER_FLAGS
from quire.serving.api import other_engines
from quire.serving.api.errors import RequestError
from quire.serving.api.options import EngineOptions
from quire.serving.api.outputs import CompletionOutput, RequestOutput
from quire.serving.api.params import SamplingParams
from quire.serving.api.vllm_names import ENGINE

TOO_LONG = RequestError("prompt", "has 9 tokens; at most 8 fit")
WORDS = ("Once ", "upon ", "a ", "time. ")


class FakeLLM:
    """Streams WORDS for every prompt, one token per word."""

    instances: list["FakeLLM"] = []
    defaults: dict[str, Any] = {}
    chat_defaults: dict[str, Any] = {}

    def __init__(self, model=None, **options):
        if model == "broken":
            raise ModelError("config.json lacks 'hidden_size'; it must be an integer")
        self.model = model
        self.options = options
        self.engine = SimpleNamespace(
            defaults=self.defaults, chat_defaults=self.chat_defaults or self.defaults
        )
        self.prompts: list[str] = []
        self.params: Any = None
        self.closed = 0
        self.adopted: str | None = None  # the chat template that was set
        self.on_word: Callable[[int], Any] = lambda count: None
        FakeLLM.instances.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def get_tokenizer(self):
        template = self.adopted if self.model == "base" else "{{ messages }}"
        return SimpleNamespace(
            chat_template=template, adopt=lambda source: setattr(self, "adopted", source)
        )

    def chat_prompt(self, messages):
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return {"prompt": text, "prompt_token_ids": [ord(letter) for letter in text]}

    def stream(self, prompt, params):
        if isinstance(prompt, dict):
            assert prompt["prompt_token_ids"] == [ord(letter) for letter in prompt["prompt"]]
            prompt = prompt["prompt"]
        self.prompts.append(prompt)
        self.params = params
        if "too long" in str(prompt):
            raise TOO_LONG
        try:
            for count in range(1, len(WORDS) + 1):
                self.on_word(count)
                reason = "length" if count == len(WORDS) else None
                text = "".join(WORDS[:count])
                tokens = list(range(count))
                outputs = [
                    CompletionOutput(index, text, tokens, finish_reason=reason)
                    for index in range(params.n)
                ]
                yield RequestOutput("0", prompt, [7, 8], outputs, finished=reason is not None)
        finally:
            self.closed += 1


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `quire ARGUMENTS` over the fake engine; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    FakeLLM.instances.clear()

    def call(*arguments: str, stdin: bytes = b""):
        monkeypatch.setattr(sys, "argv", ["quire", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        return (code, *capsys.readouterr())

    return call


@pytest.mark.parametrize(
    "text, value",
    [
        ("0", 0),
        ("4096", 4096),
        ("-1", -1),
        ("32K", 32 * 1024),
        ("32k", 32000),
        ("1.5G", 3 * 2**29),
        ("2.5k", 2500),
        ("1T", 2**40),
        ("1t", 10**12),
        (" 8M ", 8 * 2**20),
        ("3m", 3_000_000),
        ("1g", 10**9),
    ],
)
def test_human_readable_sizes_are_parsed(text, value):
    assert sizes.size(text) == value


@pytest.mark.parametrize(
    "text", ["", "K", "1.5", "0.3K", "32KB", "1e3", "nan", "32 K", "٣", "--1", "1_000"]
)
def test_invalid_sizes_are_rejected(text):
    with pytest.raises(typer.BadParameter, match="32K"):
        sizes.size(text)


def test_generate_streams_then_times(run):
    code, out, err = run("generate", "--prompt", "Hi", "--max-tokens", "4")
    assert (code, out) == (0, "Once upon a time. \n")
    assert re.fullmatch(
        r"2 prompt tokens, 4 tokens: loaded in [\d.]+ s, first token after [\d.]+ s, then [\d.]+ tokens/s\n",
        err,
    )
    (llm,) = FakeLLM.instances
    assert (llm.model, llm.options, llm.prompts) == (None, {"max_num_seqs": 1}, ["Hi"])
    assert llm.params.max_tokens == 4


def test_echo_prints_the_prompt_first(run):
    assert run("generate", "--prompt", "Hi: ", "--echo")[1] == "Hi: Once upon a time. \n"
    assert run("generate", "--prompt", "Hi: ", "--echo", "--n", "2")[1].count("Hi: Once") == 2
    code, _, err = run("generate", "--prompt", "Hi", "--echo", "--json")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(("command", "default_max_tokens"), [("generate", 128), ("chat", 512)])
def test_missing_sampling_options_come_from_the_model(
    run, monkeypatch, command, default_max_tokens
):
    def params(*arguments: str):
        assert run(command, *arguments, stdin=b"Hi\n")[0] == 0
        return FakeLLM.instances[-1].params

    assert params() == SamplingParams(max_tokens=default_max_tokens)
    monkeypatch.setattr(FakeLLM, "defaults", {"temperature": 0.5, "top_k": 9, "max_tokens": 2048})
    assert params() == SamplingParams(temperature=0.5, top_k=9, max_tokens=2048)
    assert params("--temperature", "1", "--max-tokens", "4") == SamplingParams(
        top_k=9, max_tokens=4
    )


def test_chat_uses_the_models_chat_defaults(run, monkeypatch):
    monkeypatch.setattr(FakeLLM, "chat_defaults", {"temperature": 0.8, "top_k": 40, "top_p": 0.95})
    for command in (("chat",), ("run", "some/model")):
        assert run(*command, "--top-k", "5", stdin=b"Hi\n")[0] == 0
        assert FakeLLM.instances[-1].params == SamplingParams(
            max_tokens=512, temperature=0.8, top_k=5, top_p=0.95
        )
    assert run("generate", "--prompt", "Hi")[0] == 0
    assert FakeLLM.instances[-1].params == SamplingParams(max_tokens=128)


def test_override_options_take_json_objects(run):
    assert run("generate", "--prompt", "x", "--hf-overrides", '{"a": {"b": null}}')[0] == 0
    assert FakeLLM.instances[-1].options["hf_overrides"] == {"a": {"b": None}}
    for value, message in (("{", "is not JSON"), ("[1]", "must be a JSON object")):
        code, _, err = run("generate", "--prompt", "x", "--override-generation-config", value)
        assert code == 2 and "--override-generation-config" in err and message in err


def test_generate_passes_all_options_to_the_engine(run, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Grüße\n")
    code, _, _ = run(
        "generate",
        "some/model",
        "--prompt-file",
        str(prompt),
        "--max-tokens",
        "1K",
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--top-k",
        "20",
        "--min-p",
        "0.1",
        "--seed",
        "7",
        "--stop",
        "END",
        "--stop",
        "\n\n",
        "--repetition-penalty",
        "1.1",
        "--presence-penalty",
        "0.2",
        "--frequency-penalty",
        "0.3",
        "--n",
        "3",
        "--tokenizer",
        "other",
        "--dtype",
        "float32",
        "--max-model-len",
        "-1",
        "--block-size",
        "8",
        "--kv-cache-memory-bytes",
        "2G",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "2k",
    )
    assert code == 0
    (llm,) = FakeLLM.instances
    assert (llm.model, llm.prompts) == ("some/model", ["Grüße\n"])
    assert llm.options == {
        "tokenizer": "other", "dtype": "float32", "max_model_len": -1, "block_size": 8,
        "kv_cache_memory_bytes": 2**31, "max_num_seqs": 4, "max_num_batched_tokens": 2000,
    }  # fmt: skip
    expected = {
        "n": 3,
        "max_tokens": 1024,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "seed": 7,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    assert {name: getattr(llm.params, name) for name in expected} == expected
    assert list(llm.params.stop) == ["END", "\n\n"]


@pytest.mark.parametrize("arguments", [(), ("--prompt-file", "-")])
def test_generate_reads_a_pipe(run, arguments):
    assert run("generate", *arguments, stdin="größer".encode())[0] == 0
    assert FakeLLM.instances[0].prompts == ["größer"]


def test_generate_separates_several_answers(run):
    code, out, err = run("generate", "--prompt", "Hi", "--n", "2")
    assert (code, out) == (0, "Once upon a time. \n\nOnce upon a time. \n")
    assert "8 tokens" in err


def test_generate_json_is_one_object(run):
    code, out, _ = run("generate", "--prompt", "Hi", "--n", "2", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["prompt_token_ids"] == [7, 8]
    assert [output["token_ids"] for output in data["outputs"]] == [[0, 1, 2, 3]] * 2
    assert data["outputs"][1] == {
        "index": 1,
        "text": "Once upon a time. ",
        "token_ids": [0, 1, 2, 3],
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert set(data["timing"]) == {"loaded_s", "first_token_s", "total_s", "tokens_per_second"}


@pytest.mark.parametrize(
    "arguments, stdin, message",
    [
        (["--prompt", "a", "--prompt-file", "b"], b"", "leave one out"),
        (["--prompt-file", "no/such/file"], b"", "No such file"),
        ([], b"\xff", "not UTF-8"),
        (["--prompt", "a", "--stream", "--json"], b"", "--stream"),
        (["--prompt", "a", "--stream", "--n", "2"], b"", "--stream"),
        (["--prompt", "a", "--max-tokens", "many"], b"", "32K"),
        (["--prompt", "a", "--temperature", "hot"], b"", "--temperature"),
        (["--prompt", "a", "--no-such-option"], b"", "--no-such-option"),
    ],
)
def test_generate_usage_errors_come_before_loading_a_model(run, arguments, stdin, message):
    code, out, err = run("generate", *arguments, stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err
    assert not FakeLLM.instances


@pytest.mark.parametrize(
    "arguments, line",
    [
        (
            ["broken", "--prompt", "a"],
            "error: config.json lacks 'hidden_size'; it must be an integer\n",
        ),
        (["--prompt", "too long"], f"error: {TOO_LONG}\n"),
    ],
)
def test_user_errors_are_one_line(run, arguments, line):
    assert run("generate", *arguments) == (2, "", line)


def test_invalid_sampling_parameters_are_rejected_before_loading_a_model(run):
    code, out, err = run("generate", "--prompt", "a", "--temperature", "-1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and "temperature" in err
    assert not FakeLLM.instances


def test_internal_errors_keep_their_traceback(run, monkeypatch):
    def fail(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(FakeLLM, "stream", fail)
    with pytest.raises(ValueError, match="a bug"):
        run("generate", "--prompt", "a")


def test_ctrl_c_ends_generate_quietly(run, monkeypatch):
    def interrupted(self, prompt, params):
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeLLM, "stream", interrupted)
    assert run("generate", "--prompt", "a") == (130, "", "")


# minutes in a call into C
STUCK = "import hashlib\nprint('in', flush=True)\nhashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)"
LOAD_MODEL = f"""
from quire.scripts.loading import immediate_interrupt
with immediate_interrupt():
    {STUCK.replace(chr(10), chr(10) + "    ")}
"""
SERVE_MODEL = f"""
from quire.serving.http import server
from quire.serving.http.models import Model, Models
from quire.serving.http.service import Service
from quire.serving.http.settings import ServerSettings

def make():
    {STUCK.replace(chr(10), chr(10) + "    ")}

service = Service(Models([Model(("a",), make)]), ServerSettings(port=0))
server.run(server.serve(service, lambda address: None))
"""


IMPORTING = """
import sys, time

class Jax:  # an import that swallows Ctrl-C, as JAX's does now and then
    def find_spec(self, name, path, target=None):
        if name == "jax":
            for i in range(600):
                try:
                    time.sleep(0.1) if i else print("in", flush=True)
                except KeyboardInterrupt:
                    pass

sys.meta_path.insert(0, Jax())
sys.argv = ["quire", COMMAND]
from quire.__main__ import main
main()
"""
GENERATE_COMMAND = IMPORTING.replace("COMMAND", '"generate", "--prompt", "a"')
CHAT_COMMAND = IMPORTING.replace("COMMAND", '"chat"')
SERVE_COMMAND = IMPORTING.replace("COMMAND", '"serve", "--port", "0"')


@pytest.mark.parametrize(
    ("script", "number"),
    [
        (LOAD_MODEL, signal.SIGINT),
        (SERVE_MODEL, signal.SIGTERM),
        (GENERATE_COMMAND, signal.SIGINT),
        (CHAT_COMMAND, signal.SIGINT),
        (SERVE_COMMAND, signal.SIGINT),
    ],
    ids=["loading", "serving", "generate-imports", "chat-imports", "serve-imports"],
)  # fmt: skip
@pytest.mark.slow
def test_signals_interrupt_loading_at_once(script, number):
    """Python handles a signal only after a call into C returns; a compilation is a long call."""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as for a foreground process of a shell
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert child.stdout.readline() == "in\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert (child.returncode, out) == (128 + number, ""), err
    assert "Traceback" not in err and (script is SERVE_COMMAND or not err)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_failed_step_is_reported_as_an_error(run, monkeypatch, command):
    def fails(self, prompt, params):
        yield RequestOutput(
            "0", prompt, [7], [CompletionOutput(0, "half", [1], finish_reason="error")]
        )

    monkeypatch.setattr(FakeLLM, "stream", fails)
    code, _, err = run(command, stdin=b"Hi")
    assert code == (1 if command == "generate" else 0)  # a chat goes on
    assert err.startswith("error: the step failed")


def test_timing_without_a_second_token_has_no_rate():
    assert "tokens/s" not in str(generate.Timing(1.0, 1.5, 1.5, 3, 1, 1))
    assert generate.Timing(1.0, 2.0, 4.0, 3, 1, 5).tokens_per_second == 2.0
    assert generate.Timing(1.0, 2.0, 4.0, 3, 2, 5).tokens_per_second == 1.5


def test_chat_keeps_the_conversation_until_reset(run):
    code, out, err = run(
        "chat",
        "--system",
        "Be kind.",
        "--seed",
        "3",
        stdin=("Hé\n\n  \n/reset\nagain\nmore\n/exit\nnever\n").encode(),
    )
    assert (code, err) == (0, "")
    assert out == "Once upon a time. \n" * 3
    (llm,) = FakeLLM.instances
    assert llm.prompts == [
        "<system>Be kind.<user>Hé",
        "<system>Be kind.<user>again",
        "<system>Be kind.<user>again<assistant>Once upon a time. <user>more",
    ]
    assert (llm.params.seed, llm.closed) == (3, 3)


def test_chat_continues_after_a_rejected_message(run):
    code, out, err = run("chat", stdin=b"too long\n/nonsense\nshort")
    assert (code, out) == (0, "Once upon a time. \n")
    assert "at most 8 fit" in err and "/nonsense" in err
    assert FakeLLM.instances[0].prompts[-1] == "<user>short"


def test_chat_rejects_a_model_without_a_chat_template(run):
    code, out, err = run("chat", "base", stdin=b"Hi")
    assert (code, out) == (2, "") and FakeLLM.instances[0].prompts == []
    assert err.startswith("error: base has no chat template") and "`quire generate`" in err
    assert "--chat-template FILE" in err


def test_chat_template_option_replaces_a_missing_template(run, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    for command in ("chat", "run"):
        assert (
            run(command, "base", "--chat-template", str(tmp_path / "t.jinja"), stdin=b"Hi\n")[0]
            == 0
        )
        assert FakeLLM.instances[-1].adopted == "{{ messages }}"


def test_each_run_without_a_seed_has_another_seed(run):
    for command in (("chat",), ("run", "some/model")):
        seeds = set()
        for _ in range(3):
            assert run(*command, stdin=b"Hi\n")[0] == 0
            seeds.add(FakeLLM.instances[-1].options["seed"])
            assert FakeLLM.instances[-1].params.seed is None
        assert len(seeds) == 3
    assert run("run", "some/model", "--seed", "7", stdin=b"Hi\n")[0] == 0
    assert FakeLLM.instances[-1].params.seed == 7


def test_chat_reads_multi_line_messages_between_triple_quotes(run):
    stdin = (
        b'one\n"""two\nlines\n"""\n/reset\n  """three"""\n/reset\n'
        b'"""\n  indented\n\n/exit\n""" \n/reset\n"""no end\n'
    )
    assert run("chat", stdin=stdin)[0] == 0
    assert [prompt.rsplit("<user>")[-1] for prompt in FakeLLM.instances[0].prompts] == [
        "one",
        "two\nlines",
        "three",
        "  indented\n\n/exit",
        "no end",
    ]


def test_chat_in_a_pseudo_terminal(tmp_path):
    """With a real model: speed and colours are shown; Ctrl-C at an idle prompt keeps the
    conversation; pasted lines are one message.
    """
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    child = subprocess.Popen(
        [sys.executable, "-m", "quire", "chat", "--temperature", "0", "--max-tokens", "32"],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        env=os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
    )  # fmt: skip
    os.close(follower)
    heard = b""

    def read_until(words: bytes) -> None:
        nonlocal heard
        while words not in heard:
            heard += os.read(leader, 4096)

    try:
        read_until(b"> ")
        os.write(leader, b"Sort: 52 31 90\r")
        read_until(b"prompt tokens")
        while b"\x1b[?2004h" not in heard.partition(b"prompt tokens")[2]:  # the next prompt
            heard += os.read(leader, 4096)
        os.write(leader, b"\x03")
        read_until(b"(Ctrl-D or /exit leaves)")
        os.write(leader, b"\x1b[200~Sort:\nthese\nlines\x1b[201~")
        read_until(b"lines")
        num_answers = heard.count(b"prompt tokens")
        os.write(leader, b"\r")
        while heard.count(b"prompt tokens") == num_answers:
            heard += os.read(leader, 4096)
        os.write(leader, f"/save {tmp_path / 'talk.json'}\r".encode())
        read_until(b"messages are in")
        os.write(leader, b"/exit\r")
        with suppress(OSError):  # the end, on Linux
            while chunk := os.read(leader, 4096):
                heard += chunk
        assert child.wait(300) == 0
    finally:
        child.kill()
        os.close(leader)
    output = heard.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "")
    assert (
        "\nquill\nIt is a very small model" in text and "\n/reset starts a new conversation" in text
    )
    assert "It cannot hold a conversation: /reset" in text
    assert re.search(
        r"31 52 90\n\[\d+ tokens, [\d.]+ tokens/s; first after [\d.]+ s; \d+ prompt tokens\]", text
    )
    assert "\x1b[1mquill" in output and "\x1b[2m[" in output
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [messages[0]["content"], messages[1]["content"]] == ["Sort: 52 31 90", "31 52 90"]
    assert messages[2]["content"] == "Sort:\nthese\nlines"


def test_chat_saves_and_resumes_conversations(run, tmp_path):
    file = tmp_path / "talk.json"
    code, out, err = run(
        "chat", "--system", "Be kind.", stdin=f"Hi\n/save {file}\n/save {file}\n/save\n".encode()
    )
    assert (code, err) == (0, "") and out.count(f"3 messages are in {file}") == 3
    code, _, err = run("chat", "--resume", str(file), stdin=b"more\n/save\n")
    assert (code, err) == (0, "")
    assert FakeLLM.instances[-1].prompts == [
        "<system>Be kind.<user>Hi<assistant>Once upon a time. <user>more"
    ]
    assert len(json.loads(file.read_text())["messages"]) == 5
    code, _, err = run(
        "chat", stdin=f"Hi\n/save {file}\n/save {tmp_path}/no/where\n/save\n".encode()
    )
    assert code == 0 and f"{file} is there already; /save another file" in err
    assert "no/where cannot be written: No such file" in err and "no command /save" in err
    code, _, err = run("chat", "--resume", str(file), "--system", "x", stdin=b"Hi\n")
    assert code == 2 and "leave --system out" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"), ("[]", "has no conversation"),
        ('{"messages": [{"role": "user"}]}', "has no conversation"),
        ('{"messages": [{"role": "user", "content": 3}]}', "has no conversation"), (None, "talk.json"),
    ],
)  # fmt: skip
def test_unusable_conversation_files_are_rejected(run, tmp_path, content, message):
    if content is not None:
        (tmp_path / "talk.json").write_text(content)
    code, _, err = run("chat", "--resume", str(tmp_path / "talk.json"), stdin=b"Hi\n")
    assert code == 2 and message in err and "talk.json" in err


MARKDOWN = (
    "# Title\n\nSome **bold** words and <b>no HTML</b>, so many that they need more than one line "
    "of the terminal.\nA second line.\n\n- one\n  - two\n\n```python\nif a < b:\n    x = "
    "1\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\nThe end."
)


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_incremental_markdown_rendering_equals_rendering_at_once(monkeypatch, step):
    """Compares the final screens; no word is cut at the end of a line."""
    screens = []
    for size in (step, 10_000):
        out = io.StringIO()
        monkeypatch.setattr(terminal, "FRAME_SECONDS", 0.0)
        view = terminal.RenderedAnswer(
            Console(file=out, force_terminal=True, width=40, height=12, color_system=None)
        )
        for end in range(size, len(MARKDOWN) + size, size):
            view.next_frame = 0.0
            view.update(MARKDOWN[:end])
        view.stop()
        view.finish()
        screens.append(rendered_lines(out.getvalue()))
    assert screens[0] == screens[1]
    text = "\n".join(screens[0])
    assert (
        "bold words and <b>no HTML</b>" in " ".join(text.split())
        and "**" not in text
        and "```" not in text
    )
    assert "if a < b:" in text and "    x = 1" in text and text.rstrip().endswith("The end.")
    words = set(re.findall(r"[a-z]{3,}", text))
    assert words <= set(re.findall(r"[a-z]{3,}", MARKDOWN)) and "terminal" in words
    assert max(map(len, screens[0])) <= 40


def rendered_lines(output: str) -> list[str]:
    """The final lines of a terminal, by the few escape sequences that rich uses."""
    lines = [""]
    row = 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith(("\x1b", "\r")):
            lines[row] += piece
    return "\n".join(lines).rstrip("\n").split("\n")


def test_ctrl_c_keeps_the_partial_answer_in_the_chat():
    llm = FakeLLM()
    llm.on_word = lambda count: count == 2 and os.kill(os.getpid(), signal.SIGINT)
    handler = signal.getsignal(signal.SIGINT)
    messages = chat.answer_message(llm, SamplingParams(), (), "Hi")
    assert messages[-1] == {"role": "assistant", "content": "Once upon "}
    assert llm.closed == 1
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_leaves_the_chat():
    llm = FakeLLM()

    def twice(count):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    llm.on_word = twice
    with pytest.raises(KeyboardInterrupt):
        chat.answer_message(llm, SamplingParams(), (), "Hi")
    assert llm.closed == 1


OPTIONS_WITHOUT_FLAGS = {  # fields of EngineOptions, and why they have no flag
    "model": "it is the command's argument",
    "skip_tokenizer_init": "the commands take and write text",
    "max_queued_requests": (
        "only a server refuses requests: quire serve has a flag and a default of its own"
    ),
    "seed": "quire serve has a flag of its own; elsewhere --seed is that of the request",
}


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_engine_option_is_a_flag(command):
    """Flags default to None, so that the engine decides; `--help` shows the engine's default."""
    flags = {
        flag.name: flag for flag in typer.main.get_command(app).get_command(None, command).params
    }
    for option in fields(EngineOptions):
        if option.name in OPTIONS_WITHOUT_FLAGS or (
            command == "generate" and option.name in ADAPTER_FLAGS
        ):
            continue
        flag = flags[option.name]
        short_name = option.metadata["short"]
        assert flag.opts == [
            f"--{option.name.replace('_', '-')}",
            *([f"-{short_name}"] if short_name else ()),
        ]
        assert flag.default is None
        shown_default = {"on": "True", "off": "False", "none": "None"}.get(
            flag.show_default, flag.show_default
        )
        if option.default is not None:
            assert shown_default.split(": ")[0] == str(
                None if option.default == () else option.default
            )
        assert flag.help
    if command == "serve":
        assert flags["seed"].default == EngineOptions.seed


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_of_every_command(run, command):
    code, out, err = run(*([command] if command else []), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: quire {command or ''}".rstrip() in out
    if command is None:
        assert all(name in out for name in COMMANDS)
        assert run() == (0, out, "")
    else:
        command_object = typer.main.get_command(app).get_command(None, command)
        assert COMMANDS[command][1] == command_object.get_short_help_str(1000)


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(f"bench {name}" for name in ("serve", "throughput", "latency"))]
)
@pytest.mark.parametrize("columns", ["80", "60"])
def test_help_never_truncates_option_names(run, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", columns)
    command_object = typer.main.get_command(app)
    for name in command.split():
        command_object = command_object.get_command(None, name)
    code, out, _ = run(*command.split(), "-h")
    assert code == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80
    for param in command_object.params:
        for name in (
            (*param.opts, *param.secondary_opts) if param.param_type_name == "option" else ()
        ):
            assert re.search(rf"^  (\S+( /)? )*{name}[, ]?", out, re.M), name
    assert not re.search(r"--[a-z-]+-$", out, re.M)  # nor are names broken in descriptions


def test_ignored_flags_of_other_engines_give_one_note(run):
    line = (
        "-tp 2 --trust-remote-code --swap-space 4 --enable_chunked_prefill "
        "--no-async-scheduling -O3 --task=embed"
    )
    code, out, err = run("generate", *line.split(), "--prompt", "--enforce-eager", "a/model")
    assert (code, out) == (0, "Once upon a time. \n")
    (llm,) = FakeLLM.instances
    assert llm.model == "a/model" and llm.prompts == ["--enforce-eager"]
    assert llm.options == {"tensor_parallel_size": 2, "max_num_seqs": 1}
    note, _ = err.splitlines()
    assert note.startswith(
        "note: without effect here: --trust-remote-code (no code of a checkpoint is run), --swap-"
    )
    names = re.findall(r"(--?[\w-]+) \(", note)
    assert names == [
        "--trust-remote-code",
        "--swap-space",
        "--enable-chunked-prefill",
        "--no-async-scheduling",
        "-O3",
        "--task",
    ]


def test_ignored_flags_are_disjoint_from_options():
    option_names = {
        param.name
        for command in COMMANDS
        for param in typer.main.get_command(app).get_command(None, command).params
    }
    assert not option_names & set(other_engines.FLAGS)
    assert (
        set(other_engines.VALUES)
        <= set(other_engines.NO_EFFECT)
        >= set(other_engines.SHORT.values())
    )
    assert set(other_engines.SWITCHES) <= set(other_engines.NO_EFFECT) - set(other_engines.VALUES)
    assert not set(other_engines.FLAGS) & set(ENGINE)  # one place for each name
    replacements = {
        meaning for meaning in other_engines.MEANING.values() if meaning.startswith("--")
    }
    benches = typer.main.get_command(app).get_command(None, "bench").commands
    option_names |= {param.name for bench in benches.values() for param in bench.params}
    assert {meaning[2:].replace("-", "_") for meaning in replacements} <= option_names


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --ctx-size 4096", "No such option: --ctx-size. Here it is --max-model-len."),
        ("serve -c 4096", "No such option: -c. Here it is --max-model-len."),
        ("serve -ngl 99", "No such option: -ngl (every layer is on the device: leave it out)"),
        ("serve --lora-scaled x", "No such option: --lora-scaled. Here it is --lora-modules."),
        ("generate --enable-lora", "No such option: --enable-lora"),
        ("serve --nnodes 2", "--nnodes is '2'; here it can only be 1: several hosts are named by "),
        ("generate --n-predict 3", "No such option: --n-predict. Here it is --max-tokens."),
        ("plan --ctx-size 4", "No such option: --ctx-size"),
        ("generate --tempreature 3", "No such option: --tempreature. Did you mean --temperature?"),
        (
            "serve --max-model-length 4",
            "No such option: --max-model-length. Did you mean --max-model-len?",
        ),
        (
            "serve --tensor-parallel 2",
            "No such option: --tensor-parallel. Did you mean --tensor-parallel-size?",
        ),
        # not --max-tokens, though it looks alike
        ("generate --min-tokens 3", "No such option: --min-tokens"),
        ("generate --top-n 3", "No such option: --top-n"),
        (
            "bench serve --random-inptu-len 4",
            "No such option: --random-inptu-len. Did you mean --random-input-len?",
        ),
        ("serve --log x", "No such option: --log"),
        (
            "serve --tokenizer-mode mistral",
            "--tokenizer-mode is 'mistral'; here it can only be auto, hf: the ",
        ),
        ("plan --enforce-eager", "No such option: --enforce-eager"),
        ("ls", "No such command 'ls': here it is 'list'"),
        ("help serve", "No such command 'help': `quire --help` lists the commands, and "),
        (
            "create x",
            ("No such command 'create': a model is a folder with config.json, tokenizer.json and "),
        ),
    ],
)
def test_unknown_options_suggest_their_equivalents(run, line, message):
    code, out, err = run(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        err.startswith(f"error: {message}")
        if message.endswith(" ")
        else err == f"error: {message}\n"
    )


def test_run_combines_its_prompt_with_stdin(run):
    """Stdin comes before the prompt; without both the command fails before it loads a model."""
    code, out, _ = run(
        "run", "some/model", "Why", "so?", "--system", "Be kind.", stdin=b"It is late.\n"
    )
    assert (code, out) == (0, "".join(WORDS) + "\n")
    assert FakeLLM.instances[-1].model == "some/model"
    assert FakeLLM.instances[-1].prompts == ["<system>Be kind.<user>It is late.\n\nWhy so?"]
    assert run("run", "some/model", stdin=b"a\nb\n")[0] == 0
    assert FakeLLM.instances[-1].prompts == ["<user>a\nb"]
    FakeLLM.instances.clear()
    code, _, err = run("run", "some/model")
    assert code == 2 and err.startswith("error: no prompt: ") and not FakeLLM.instances
    code, _, err = run("run", "some/model", "too long")
    assert code == 1 and str(TOO_LONG) in err


@pytest.mark.parametrize("line", ["--model {}", "--model={}", "-m {}", "{}"])
def test_the_model_may_be_given_as_an_option(run, line):
    code, out, _ = run("generate", "--prompt", "a", *line.format("some/model").split())
    assert (code, FakeLLM.instances[-1].model) == (0, "some/model")
    assert run("generate", "one", "-m", "two", "--prompt", "a")[0] == 2
    assert "No such option: -m" in run("collect-env", "-m", "a")[2]


def test_mistyped_commands_get_a_suggestion(run):
    code, _, err = run("genrate")
    assert (code, err) == (2, "error: No such command 'genrate'. Did you mean 'generate'?\n")


@pytest.mark.parametrize(
    ("kernels", "attention_line"),
    [
        ("", "native|xla; native declines: .*"),
        (
            "off",
            (
                "xla; native declines: .*off; mosaic_tpu declines: there is no TPU; mosaic_gpu "
                "declines: .*"
            ),
        ),
    ],
)
def test_collect_env_lists_attention_backends(capsys, monkeypatch, kernels, attention_line):
    monkeypatch.setenv("QUIRE_NATIVE", kernels)
    collect_env.main()
    out = capsys.readouterr().out
    for section in (
        "versions",
        "machine",
        "devices",
        "caches",
        "environment",
        "kernels",
        "attention",
    ):
        assert f"\n{section}:\n" in "\n" + out
    assert f"  quire: {quire.__version__}\n" in out
    assert re.search(f"^  full: ({attention_line})$", out, re.M)


@pytest.mark.slow
def test_collect_env_reports_batch_invariance(monkeypatch):
    from quire.ops.linear import xla

    monkeypatch.setenv("QUIRE_NATIVE", "off")
    jax.clear_caches()  # forget steps that were traced with native kernels
    assert [*collect_env.invariance()] == [("the bundled model", "no"), ("because", xla.varies())]
    monkeypatch.setattr(xla, "varies", lambda: None)
    assert [*collect_env.invariance()] == [("the bundled model", "yes")]
    jax.clear_caches()


def test_collect_env_reports_why_a_backend_is_unsupported(monkeypatch):
    from quire.ops import attention, rope
    from quire.ops.attention.backend import AttentionBackend

    fast = AttentionBackend(attention.paged_attention, lambda *_: "needs a newer card")
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", {"fast": "..rope", "xla": ".xla"})
    monkeypatch.setattr(rope, "BACKEND", fast, raising=False)
    assert dict(collect_env.attention())["sinks"] == "xla; fast declines: needs a newer card"
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", {"fast": "..rope"})
    assert dict(collect_env.attention())["full"] == "none; fast declines: needs a newer card"


def test_collect_env_reports_a_missing_library(monkeypatch, capsys):
    """A server would end with this error."""
    from quire.ops.errors import MissingLibrary

    def sections():
        raise MissingLibrary("No module named 'absl'")
        yield

    for name in ("kernels", "invariance"):
        monkeypatch.setattr(collect_env, name, lambda: iter(()))
    monkeypatch.setattr(collect_env, "attention", sections)
    collect_env.main()
    *_, error, title = capsys.readouterr().out.splitlines()
    assert (error, title) == ("  error: No module named 'absl'", "the same bits in any batch:")


def test_module_runs_as_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "quire", "--version"], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, f"quire {quire.__version__}\n", "")


def test_exports_are_the_public_names():
    assert set(quire.EXPORTS) <= set(dir(quire))
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        quire.llm  # noqa: B018
