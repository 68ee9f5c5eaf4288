"""The command line over an engine that only remembers what it was asked: parsing, printing, errors,
Ctrl-C.
"""

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
    """Streams WORDS whatever is asked; a token a word."""

    made: list["FakeLLM"] = []
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
        self.adopted: str | None = None  # a chat template
        self.on_word: Callable[[int], Any] = lambda count: None
        FakeLLM.made.append(self)

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
    """Runs `quire ARGUMENTS` over the fake engine: (exit code, stdout, stderr)."""
    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    FakeLLM.made.clear()

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
def test_sizes_as_people_write_them(text, value):
    assert sizes.size(text) == value


@pytest.mark.parametrize(
    "text", ["", "K", "1.5", "0.3K", "32KB", "1e3", "nan", "32 K", "٣", "--1", "1_000"]
)
def test_what_is_no_size(text):
    with pytest.raises(typer.BadParameter, match="32K"):
        sizes.size(text)


def test_generate_streams_then_times(run):
    code, out, err = run("generate", "--prompt", "Hi", "--max-tokens", "4")
    assert (code, out) == (0, "Once upon a time. \n")
    assert re.fullmatch(
        r"2 prompt tokens, 4 tokens: loaded in [\d.]+ s, first token after [\d.]+ s, then [\d.]+ tokens/s\n",
        err,
    )
    (llm,) = FakeLLM.made
    assert (llm.model, llm.options, llm.prompts) == (None, {"max_num_seqs": 1}, ["Hi"])
    assert llm.params.max_tokens == 4


def test_echo_prints_the_prompt_first(run):
    assert run("generate", "--prompt", "Hi: ", "--echo")[1] == "Hi: Once upon a time. \n"
    assert run("generate", "--prompt", "Hi: ", "--echo", "--n", "2")[1].count("Hi: Once") == 2
    code, _, err = run("generate", "--prompt", "Hi", "--echo", "--json")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(("command", "most"), [("generate", 128), ("chat", 512)])
def test_what_is_not_given_is_the_models_own(run, monkeypatch, command, most):
    def params(*arguments: str):
        assert run(command, *arguments, stdin=b"Hi\n")[0] == 0
        return FakeLLM.made[-1].params

    assert params() == SamplingParams(max_tokens=most)
    monkeypatch.setattr(FakeLLM, "defaults", {"temperature": 0.5, "top_k": 9, "max_tokens": 2048})
    assert params() == SamplingParams(temperature=0.5, top_k=9, max_tokens=2048)
    assert params("--temperature", "1", "--max-tokens", "4") == SamplingParams(
        top_k=9, max_tokens=4
    )


def test_chat_uses_the_defaults_of_conversations(run, monkeypatch):
    monkeypatch.setattr(FakeLLM, "chat_defaults", {"temperature": 0.8, "top_k": 40, "top_p": 0.95})
    for command in (("chat",), ("run", "some/model")):
        assert run(*command, "--top-k", "5", stdin=b"Hi\n")[0] == 0
        assert FakeLLM.made[-1].params == SamplingParams(
            max_tokens=512, temperature=0.8, top_k=5, top_p=0.95
        )
    assert run("generate", "--prompt", "Hi")[0] == 0
    assert FakeLLM.made[-1].params == SamplingParams(max_tokens=128)


def test_overrides_are_json(run):
    assert run("generate", "--prompt", "x", "--hf-overrides", '{"a": {"b": null}}')[0] == 0
    assert FakeLLM.made[-1].options["hf_overrides"] == {"a": {"b": None}}
    for wrong, why in (("{", "is not JSON"), ("[1]", "must be a JSON object")):
        code, _, err = run("generate", "--prompt", "x", "--override-generation-config", wrong)
        assert code == 2 and "--override-generation-config" in err and why in err


def test_generate_passes_every_option_on(run, tmp_path):
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
    (llm,) = FakeLLM.made
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
    assert FakeLLM.made[0].prompts == ["größer"]


def test_generate_prints_several_answers_apart(run):
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
    "arguments, stdin, says",
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
def test_generate_refuses_before_it_loads_a_model(run, arguments, stdin, says):
    code, out, err = run("generate", *arguments, stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and says in err
    assert not FakeLLM.made


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
def test_what_a_user_can_mend_is_one_line(run, arguments, line):
    assert run("generate", *arguments) == (2, "", line)


def test_a_bad_sampling_parameter_is_refused_before_the_model_is_loaded(run):
    code, out, err = run("generate", "--prompt", "a", "--temperature", "-1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and "temperature" in err
    assert not FakeLLM.made


def test_a_bug_keeps_its_traceback(run, monkeypatch):
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


# minutes in C
STUCK = "import hashlib\nprint('in', flush=True)\nhashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)"
LOADING = f"""
from quire.scripts.loading import immediate_interrupt
with immediate_interrupt():
    {STUCK.replace(chr(10), chr(10) + "    ")}
"""
SERVING = f"""
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
GENERATING = IMPORTING.replace("COMMAND", '"generate", "--prompt", "a"')
CHATTING = IMPORTING.replace("COMMAND", '"chat"')
SERVES = IMPORTING.replace("COMMAND", '"serve", "--port", "0"')


@pytest.mark.parametrize(
    ("script", "number"),
    [
        (LOADING, signal.SIGINT), (SERVING, signal.SIGTERM), (GENERATING, signal.SIGINT), (CHATTING, signal.SIGINT),
        (SERVES, signal.SIGINT),
    ],
    ids=["loading", "serving", "generate-imports", "chat-imports", "serve-imports"],
)  # fmt: skip
@pytest.mark.slow
def test_a_signal_ends_what_loads_at_once(script, number):
    """Python hears a signal when a call into C is over; a compilation is a long one."""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as a shell's foreground has it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert child.stdout.readline() == "in\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert (child.returncode, out) == (128 + number, ""), err
    assert "Traceback" not in err and (script is SERVES or not err)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_failed_step_is_no_answer(run, monkeypatch, command):
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


def test_chat_remembers_and_forgets(run):
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
    (llm,) = FakeLLM.made
    assert llm.prompts == [
        "<system>Be kind.<user>Hé",
        "<system>Be kind.<user>again",
        "<system>Be kind.<user>again<assistant>Once upon a time. <user>more",
    ]
    assert (llm.params.seed, llm.closed) == (3, 3)


def test_chat_goes_on_after_a_refused_turn(run):
    code, out, err = run("chat", stdin=b"too long\n/nonsense\nshort")
    assert (code, out) == (0, "Once upon a time. \n")
    assert "at most 8 fit" in err and "/nonsense" in err
    assert FakeLLM.made[0].prompts[-1] == "<user>short"


def test_chat_says_at_once_that_a_model_has_no_chat_template(run):
    code, out, err = run("chat", "base", stdin=b"Hi")
    assert (code, out) == (2, "") and FakeLLM.made[0].prompts == []
    assert err.startswith("error: base has no chat template") and "`quire generate`" in err
    assert "--chat-template FILE" in err


def test_a_model_without_a_chat_template_can_be_given_one(run, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    for command in ("chat", "run"):
        assert (
            run(command, "base", "--chat-template", str(tmp_path / "t.jinja"), stdin=b"Hi\n")[0]
            == 0
        )
        assert FakeLLM.made[-1].adopted == "{{ messages }}"


def test_answers_without_a_seed_vary_from_call_to_call(run):
    for command in (("chat",), ("run", "some/model")):
        seeds = set()
        for _ in range(3):
            assert run(*command, stdin=b"Hi\n")[0] == 0
            seeds.add(FakeLLM.made[-1].options["seed"])
            assert FakeLLM.made[-1].params.seed is None
        assert len(seeds) == 3
    assert run("run", "some/model", "--seed", "7", stdin=b"Hi\n")[0] == 0
    assert FakeLLM.made[-1].params.seed == 7


def test_a_message_of_several_lines_stands_between_fences(run):
    said = (
        b'one\n"""two\nlines\n"""\n/reset\n  """three"""\n/reset\n'
        b'"""\n  indented\n\n/exit\n""" \n/reset\n"""no end\n'
    )
    assert run("chat", stdin=said)[0] == 0
    assert [prompt.rsplit("<user>")[-1] for prompt in FakeLLM.made[0].prompts] == [
        "one",
        "two\nlines",
        "three",
        "  indented\n\n/exit",
        "no end",
    ]


def test_a_terminal_sees_the_model_the_speed_and_colour(tmp_path):
    """As a user: in a pseudo-terminal, with a real model.

    Ctrl-C at an idle prompt keeps the conversation, and lines that are pasted are one message.
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

    def until(words: bytes) -> None:
        nonlocal heard
        while words not in heard:
            heard += os.read(leader, 4096)

    try:
        until(b"> ")
        os.write(leader, b"Sort: 52 31 90\r")
        until(b"prompt tokens")
        while b"\x1b[?2004h" not in heard.partition(b"prompt tokens")[2]:  # the next prompt
            heard += os.read(leader, 4096)
        os.write(leader, b"\x03")
        until(b"(Ctrl-D or /exit leaves)")
        os.write(leader, b"\x1b[200~Sort:\nthese\nlines\x1b[201~")
        until(b"lines")
        answered = heard.count(b"prompt tokens")
        os.write(leader, b"\r")
        while heard.count(b"prompt tokens") == answered:
            heard += os.read(leader, 4096)
        os.write(leader, f"/save {tmp_path / 'talk.json'}\r".encode())
        until(b"messages are in")
        os.write(leader, b"/exit\r")
        with suppress(OSError):  # the end, on Linux
            while more := os.read(leader, 4096):
                heard += more
        assert child.wait(300) == 0
    finally:
        child.kill()
        os.close(leader)
    seen = heard.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r", "")
    assert (
        "\nquill\nIt is a very small model" in plain
        and "\n/reset starts a new conversation" in plain
    )
    assert "It cannot hold a conversation: /reset" in plain
    assert re.search(
        r"31 52 90\n\[\d+ tokens, [\d.]+ tokens/s; first after [\d.]+ s; \d+ prompt tokens\]", plain
    )
    assert "\x1b[1mquill" in seen and "\x1b[2m[" in seen
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [messages[0]["content"], messages[1]["content"]] == ["Sort: 52 31 90", "31 52 90"]
    assert messages[2]["content"] == "Sort:\nthese\nlines"


def test_a_conversation_is_saved_and_resumed(run, tmp_path):
    file = tmp_path / "talk.json"
    code, out, err = run(
        "chat", "--system", "Be kind.", stdin=f"Hi\n/save {file}\n/save {file}\n/save\n".encode()
    )
    assert (code, err) == (0, "") and out.count(f"3 messages are in {file}") == 3
    code, _, err = run("chat", "--resume", str(file), stdin=b"more\n/save\n")
    assert (code, err) == (0, "")
    assert FakeLLM.made[-1].prompts == [
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
    ("content", "why"),
    [
        ("{", "is not JSON"), ("[]", "has no conversation"),
        ('{"messages": [{"role": "user"}]}', "has no conversation"),
        ('{"messages": [{"role": "user", "content": 3}]}', "has no conversation"), (None, "talk.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_named(run, tmp_path, content, why):
    if content is not None:
        (tmp_path / "talk.json").write_text(content)
    code, _, err = run("chat", "--resume", str(tmp_path / "talk.json"), stdin=b"Hi\n")
    assert code == 2 and why in err and "talk.json" in err


MARKDOWN = (
    "# Title\n\nSome **bold** words and <b>no HTML</b>, so many that they need more than one line "
    "of the terminal.\nA second line.\n\n- one\n  - two\n\n```python\nif a < b:\n    x = "
    "1\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\nThe end."
)


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_answers_are_rendered_the_same_however_they_grow(monkeypatch, step):
    """What stays on the screen, by the last drawing of each line; no word is cut."""
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
        screens.append(screen_of(out.getvalue()))
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


def screen_of(output: str) -> list[str]:
    """The lines that a terminal shows in the end, by the few movements that rich uses."""
    lines = [""]
    row = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return "\n".join(lines).rstrip("\n").split("\n")


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    llm = FakeLLM()
    llm.on_word = lambda count: count == 2 and os.kill(os.getpid(), signal.SIGINT)
    before = signal.getsignal(signal.SIGINT)
    messages = chat.answer_message(llm, SamplingParams(), (), "Hi")
    assert messages[-1] == {"role": "assistant", "content": "Once upon "}
    assert llm.closed == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves():
    llm = FakeLLM()

    def twice(count):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    llm.on_word = twice
    with pytest.raises(KeyboardInterrupt):
        chat.answer_message(llm, SamplingParams(), (), "Hi")
    assert llm.closed == 1


NOT_FLAGS = {  # fields of EngineOptions, and why no flag is made of them
    "model": "it is the command's argument",
    "skip_tokenizer_init": "the commands take and write text",
    "max_queued_requests": (
        "only a server refuses requests: quire serve has a flag and a default of its own"
    ),
    "seed": "quire serve has a flag of its own; elsewhere --seed is that of the request",
}


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_every_engine_option_is_a_flag(command):
    """Flags default to None, so that the engine decides; what `--help` says must be what it
    decides.
    """
    flags = {
        flag.name: flag for flag in typer.main.get_command(app).get_command(None, command).params
    }
    for option in fields(EngineOptions):
        if option.name in NOT_FLAGS or (command == "generate" and option.name in ADAPTER_FLAGS):
            continue
        flag = flags[option.name]
        short = option.metadata["short"]
        assert flag.opts == [
            f"--{option.name.replace('_', '-')}",
            *([f"-{short}"] if short else ()),
        ]
        assert flag.default is None
        said = {"on": "True", "off": "False", "none": "None"}.get(
            flag.show_default, flag.show_default
        )
        if option.default is not None:
            assert said.split(": ")[0] == str(None if option.default == () else option.default)
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


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(f"bench {name}" for name in ("serve", "throughput", "latency"))]
)
@pytest.mark.parametrize("columns", ["80", "60"])
def test_help_has_every_name_whole(run, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", columns)
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.get_command(None, name)
    code, out, _ = run(*command.split(), "-h")
    assert code == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80
    for param in found.params:
        for name in (
            (*param.opts, *param.secondary_opts) if param.param_type_name == "option" else ()
        ):
            assert re.search(rf"^  (\S+( /)? )*{name}[, ]?", out, re.M), name
    assert not re.search(r"--[a-z-]+-$", out, re.M)  # nor is one broken where others are explained


def test_flags_of_other_engines_that_change_nothing_are_one_warning(run):
    line = (
        "-tp 2 --trust-remote-code --swap-space 4 --enable_chunked_prefill "
        "--no-async-scheduling -O3 --task=embed"
    )
    code, out, err = run("generate", *line.split(), "--prompt", "--enforce-eager", "a/model")
    assert (code, out) == (0, "Once upon a time. \n")
    (llm,) = FakeLLM.made
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


def test_no_flag_is_both_an_option_and_without_effect():
    own = {
        param.name
        for command in COMMANDS
        for param in typer.main.get_command(app).get_command(None, command).params
    }
    assert not own & set(other_engines.FLAGS)
    assert (
        set(other_engines.VALUES)
        <= set(other_engines.NO_EFFECT)
        >= set(other_engines.SHORT.values())
    )
    assert set(other_engines.SWITCHES) <= set(other_engines.NO_EFFECT) - set(other_engines.VALUES)
    assert not set(other_engines.FLAGS) & set(ENGINE)  # one place for each name
    meant = {meaning for meaning in other_engines.MEANING.values() if meaning.startswith("--")}
    benches = typer.main.get_command(app).get_command(None, "bench").commands
    own |= {param.name for bench in benches.values() for param in bench.params}
    assert {meaning[2:].replace("-", "_") for meaning in meant} <= own


@pytest.mark.parametrize(
    ("line", "says"),
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
def test_what_is_unknown_is_met_with_what_means_the_same_or_nothing(run, line, says):
    code, out, err = run(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {says}") if says.endswith(" ") else err == f"error: {says}\n"


def test_run_answers_a_prompt_and_what_is_piped_in(run):
    """What stdin has comes before the prompt; nothing of both is refused before a model is
    loaded.
    """
    code, out, _ = run(
        "run", "some/model", "Why", "so?", "--system", "Be kind.", stdin=b"It is late.\n"
    )
    assert (code, out) == (0, "".join(WORDS) + "\n")
    assert FakeLLM.made[-1].model == "some/model"
    assert FakeLLM.made[-1].prompts == ["<system>Be kind.<user>It is late.\n\nWhy so?"]
    assert run("run", "some/model", stdin=b"a\nb\n")[0] == 0
    assert FakeLLM.made[-1].prompts == ["<user>a\nb"]
    FakeLLM.made.clear()
    code, _, err = run("run", "some/model")
    assert code == 2 and err.startswith("error: no prompt: ") and not FakeLLM.made
    code, _, err = run("run", "some/model", "too long")
    assert code == 1 and str(TOO_LONG) in err


@pytest.mark.parametrize("line", ["--model {}", "--model={}", "-m {}", "{}"])
def test_the_model_may_be_an_option_as_with_other_engines(run, line):
    code, out, _ = run("generate", "--prompt", "a", *line.format("some/model").split())
    assert (code, FakeLLM.made[-1].model) == (0, "some/model")
    assert run("generate", "one", "-m", "two", "--prompt", "a")[0] == 2
    assert "No such option: -m" in run("collect-env", "-m", "a")[2]


def test_a_mistyped_command_is_met_with_the_right_one(run):
    code, _, err = run("genrate")
    assert (code, err) == (2, "error: No such command 'genrate'. Did you mean 'generate'?\n")


@pytest.mark.parametrize(
    ("kernels", "serves"),
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
def test_collect_env_tells_what_serves(capsys, monkeypatch, kernels, serves):
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
    assert re.search(f"^  full: ({serves})$", out, re.M)


@pytest.mark.slow
def test_collect_env_tells_whether_a_batch_changes_bits(monkeypatch):
    """By what the engine's own steps are made of, each implementation by its own word."""
    from quire.ops.linear import xla

    monkeypatch.setenv("QUIRE_NATIVE", "off")
    jax.clear_caches()  # what was traced with kernels
    assert [*collect_env.invariance()] == [("the bundled model", "no"), ("because", xla.varies())]
    monkeypatch.setattr(xla, "varies", lambda: None)
    assert [*collect_env.invariance()] == [("the bundled model", "yes")]
    jax.clear_caches()


def test_collect_env_says_why_one_does_not(monkeypatch):
    from quire.ops import attention, rope
    from quire.ops.attention.backend import AttentionBackend

    fast = AttentionBackend(attention.paged_attention, lambda *_: "needs a newer card")
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", {"fast": "..rope", "xla": ".xla"})
    monkeypatch.setattr(rope, "BACKEND", fast, raising=False)
    assert dict(collect_env.attention())["sinks"] == "xla; fast declines: needs a newer card"
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", {"fast": "..rope"})
    assert dict(collect_env.attention())["full"] == "none; fast declines: needs a newer card"


def test_collect_env_says_which_library_is_missing(monkeypatch, capsys):
    """With all that follows: a server would end with this error."""
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


def test_public_names():
    assert set(quire.EXPORTS) <= set(dir(quire))
    with pytest.raises(AttributeError, match="no attribute 'llm'"):
        quire.llm  # noqa: B018
