"""`quire run-batch`: every line becomes a request or an error, and results come in order."""

import io
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

import quire
from quire.__main__ import main
from quire.model.text.chat_template import PromptError
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import CompletionOutput, FinishReason, RequestOutput
from quire.serving.api.params import SamplingParams
from quire.serving.protocol.batch_file import parse_lines

CHAT = "/v1/chat/completions"


def batch_line(custom_id: str, url: str = "/v1/completions", **body) -> bytes:
    """A line of a batch file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


class Request:
    """Finishes after as many steps as its prompt has characters or tokens."""

    def __init__(self, name: str, prompt: str | list[int], params: SamplingParams):
        self.request_id, self.prompt, self.params, self.steps = name, prompt, params, len(prompt)
        self.reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        return self.reason is not None

    def output(self) -> RequestOutput:
        answers = [
            CompletionOutput(i, f"<{self.prompt}>", [1, 2], finish_reason=self.reason)
            for i in range(self.params.n)
        ]
        return RequestOutput(self.request_id, None, [5] * len(self.prompt), answers, self.finished)


class LetterTokenizer:
    """One token per character; a chat prompt is its messages and the names of template options."""

    def max_characters(self, num_tokens: int) -> int:
        return num_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def template_for(self, tools) -> str:
        return "{{ tools }} <tool_call>"

    def apply_chat_template(self, messages, add_generation_prompt, **options) -> str:
        if "refuse" in messages[-1]["content"]:
            raise PromptError("chat template: no")
        return "".join(message["content"] for message in messages) + "".join(options)


class FakeLLM:
    """Echoes prompts; some prompts make it reject, fail or raise KeyboardInterrupt."""

    instances: list["FakeLLM"] = []
    defaults: dict[str, float] = {}

    def __init__(self, model=None, **options):
        self.model = model  # it is its own engine
        self.options = options
        self.engine = self
        self.tokenizer, self.ids, self.busy = LetterTokenizer(), itertools.count(), False
        self.max_len, self.config = 1000, SimpleNamespace(vocab_size=1000)
        self.runner = SimpleNamespace(shape=SimpleNamespace(num_logprobs=20))
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        FakeLLM.instances.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def check_images(self, images):
        assert not images

    def read_images(self, tokens, images, is_client):
        return tokens, None

    def add(self, name, tokens, params, text, request_options, media):
        assert media is None
        if text == "too long":
            raise RequestError("prompt", "has 9 tokens; at most 8 fit")
        assert text is None or tokens == list(map(ord, text))
        request = Request(name, tokens if text is None else text, params)
        self.requests.append(request)
        self.busy = True
        return request

    def step(self):
        for request in self.requests:
            if request.reason is None:
                request.steps -= 1
                if request.steps <= 0:
                    if request.prompt == "interrupt":
                        raise KeyboardInterrupt
                    request.reason = "error" if request.prompt == "fail" else "stop"
        self.busy = not all(request.finished for request in self.requests)
        return list(self.requests)

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.requests[int(request_id)].reason = "abort"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a batch of lines; returns (exit code, results, stderr)."""
    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    FakeLLM.instances.clear()

    def call(*lines: bytes, arguments: tuple[str, ...] = ()):
        (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
        files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
        monkeypatch.setattr(sys, "argv", ["quire", "run-batch", *files, *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        out = tmp_path / "out.jsonl"
        results = (
            [json.loads(result_line) for result_line in out.read_text().splitlines()]
            if out.exists()
            else []
        )
        return code, results, capsys.readouterr().err

    return call


def answer_texts(result: dict) -> list[str]:
    choices = result["response"]["body"]["choices"]
    return [
        choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices
    ]


def test_results_come_in_the_order_of_the_lines(run):
    code, results, err = run(
        batch_line("slow", prompt="a long prompt"),
        batch_line("many", prompt=["a", "bb"], n=2),
        batch_line(
            "chat",
            CHAT,
            messages=[{"role": "user", "content": "hi"}],
            chat_template_kwargs={"+": 1},
        ),
        batch_line("ids", prompt=[7, 8]),
    )
    assert code == 0
    assert [result["custom_id"] for result in results] == ["slow", "many", "chat", "ids"]
    assert [answer_texts(result) for result in results] == [
        ["<a long prompt>"], ["<a>", "<a>", "<bb>", "<bb>"], ["<hi+>"], ["<[7, 8]>"],
    ]  # fmt: skip
    for result in results:
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
        assert result["id"] == result["response"]["request_id"]
        assert result["response"]["body"]["model"] == "quill"
    assert results[1]["response"]["body"]["usage"]["prompt_tokens"] == 3
    assert results[2]["response"]["body"]["object"] == "chat.completion"
    assert len({result["id"] for result in results}) == 4
    assert err.startswith("4 answered, 0 refused: 14 tokens in ")


def test_batch_lines_with_tools_return_tool_calls(run):
    content = '<tool_call>{"name": "look_up", "arguments": {"city": "Rome"}}</tool_call>'
    fields = {"messages": [{"role": "user", "content": content}]}
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    _, results, _ = run(
        batch_line("with", CHAT, tools=tools, **fields), batch_line("without", CHAT, **fields)
    )
    with_call, without_call = (result["response"]["body"]["choices"][0] for result in results)
    assert (
        with_call["finish_reason"] == "tool_calls" and with_call["message"]["content"] == "<tools>"
    )
    (call,) = with_call["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "look_up",
        {"city": "Rome"},
    )
    assert without_call["message"] == {
        "role": "assistant",
        "content": f"<{content}>",
        "reasoning": None,
    }


INVALID_LINES = [
    (b"{", None, "line 2: must be JSON: "),
    (b"[1]", None, "line 2: must be a JSON object, got [1]"),
    (b'{"custom_id": "\xff"}', None, "line 2: must be JSON in UTF-8: "),
    (b'{"custom_id": NaN}', None, "line 2: must be JSON, which has no NaN"),
    (b"[" * 100_000, None, "line 2: must be JSON that is not nested so deep"),
    (b"1" * 5000, None, "line 2: must be JSON in UTF-8: "),
    (b"{}", None, "line 2: custom_id: must be a string that is not empty, got None"),
    (b'{"custom_id": 5}', None, "line 2: custom_id: "),
    (
        batch_line("first", prompt="a"),
        "first",
        "line 2: custom_id: must differ, got 'first' as in line 1",
    ),
    (b'{"custom_id": "x"}', "x", "line 2: method: must be 'POST', got None"),
    (
        b'{"custom_id": "x", "methud": 1}',
        "x",
        "line 2: methud: unknown field; did you mean 'method'?",
    ),
    (
        batch_line("x", "/v1/embeddings"),
        "x",
        "line 2: url: must be /v1/chat/completions or /v1/completions, got '/v1/emb",
    ),
    (b'{"custom_id": "x", "method": "POST", "url": ["a"]}', "x", "line 2: url: must be "),
    (
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}',
        "x",
        "line 2: body: must be a JSON object",
    ),
    (
        batch_line("x", prompt="a", temperature=-1),
        "x",
        "line 2: body.temperature: must be a number from 0 to 100",
    ),
    (
        batch_line("x", prompt="a").replace(b'"a"', b'"a", "top_p": 1e400'),
        "x",
        "line 2: body.top_p: must be a number",
    ),
    (batch_line("x", prompt="a", logits=1), "x", "line 2: body.logits: unknown field"),
    (batch_line("x", prompt="a", stream=True), "x", "line 2: body.stream: has no place in a batch"),
    (
        batch_line("x", prompt="a", model="gpt"),
        "x",
        "line 2: body.model: must be 'quill', which --served-model-name can",
    ),
    (batch_line("x", prompt=["a", "too long"]), "x", "line 2: prompt: has 9 tokens; at most 8 fit"),
    (
        batch_line("x", CHAT, messages=[{"role": "user", "content": "refuse"}]),
        "x",
        "line 2: messages: chat template: no",
    ),
    (
        batch_line("x", CHAT, messages=[{"role": "user"}]),
        "x",
        "line 2: body.messages[0].content: must be a string",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "custom_id", "message"),
    INVALID_LINES,
    ids=[message[8:40] for *_, message in INVALID_LINES],
)
def test_an_invalid_line_does_not_affect_other_lines(run, wrong, custom_id, message):
    code, results, err = run(
        batch_line("first", prompt="one"), wrong, batch_line("last", prompt="two")
    )
    assert code == 0
    assert [answer_texts(results[0]), answer_texts(results[2])] == [["<one>"], ["<two>"]]
    failed = results[1]
    assert (failed["custom_id"], failed["response"]) == (custom_id, None)
    assert failed["error"]["message"].startswith(message)
    assert "\n" not in failed["error"]["message"] and len(failed["error"]["message"]) < 400
    assert failed["error"]["code"] == "invalid_request" and failed["error"]["line"] == 2
    assert err.startswith("2 answered, 1 refused: 4 tokens")


def test_a_rejected_prompt_aborts_the_other_prompts_of_its_line(run):
    run(batch_line("a", prompt=["one", "too long", "three"]))
    (llm,) = FakeLLM.instances
    assert [request.prompt for request in llm.requests] == ["one"]
    assert llm.aborted == ["0"]


def test_a_request_that_fails_in_the_engine_is_a_server_error(run):
    code, results, _ = run(batch_line("a", prompt="fail"), batch_line("b", prompt="fine"))
    assert code == 0
    assert results[0]["error"]["code"] == "server_error"
    assert answer_texts(results[1]) == ["<fine>"]


def test_ctrl_c_keeps_finished_results(run):
    code, results, err = run(
        batch_line("never", prompt="a prompt so long that it never ends"),
        batch_line("quick", prompt="a"),
        batch_line("c", prompt="interrupt"),
    )
    assert code == 130
    assert [result["custom_id"] for result in results] == ["quick"]
    assert err.startswith("1 answered, 0 refused, 2 left: ")


def test_missing_sampling_fields_come_from_the_model(run, monkeypatch):
    monkeypatch.setattr(FakeLLM, "defaults", {"temperature": 0.25, "max_tokens": 3})
    run(batch_line("a", prompt="x"), batch_line("b", prompt="x", temperature=1, max_tokens=9))
    default, explicit = (request.params for request in FakeLLM.instances[-1].requests)
    assert (default.temperature, default.max_tokens) == (0.25, 3)
    assert (explicit.temperature, explicit.max_tokens) == (1, 9)


def test_accepted_model_names_of_a_batch(run):
    lines = [batch_line(name, prompt="a", model=name) for name in ("org/name", "name", "other")]
    _, results, _ = run(*lines, arguments=("org/name", "--max-num-seqs", "2"))
    assert [result["error"] is None for result in results] == [True, True, False]
    assert [result["response"]["body"]["model"] for result in results[:2]] == ["org/name", "name"]
    (llm,) = FakeLLM.instances
    assert (llm.model, llm.options) == ("org/name", {"max_num_seqs": 2})
    _, results, _ = run(*lines, arguments=("org/name", "--served-model-name", "other"))
    assert [result["error"] is None for result in results] == [False, False, True]


def test_blank_lines_and_carriage_returns_are_ignored(run):
    _, results, _ = run(
        b"", batch_line("a", prompt="x") + b"\r", b"  ", batch_line("b", prompt="y"), b"{", b""
    )
    assert [result["custom_id"] for result in results] == ["a", "b", None]
    assert results[2]["error"]["line"] == 5
    assert run()[:2] == (0, [])


def test_an_empty_batch_has_no_results():
    assert list(parse_lines([b"", b"\n"])) == []


def test_run_batch_from_stdin_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(sys, "argv", ["quire", "run-batch", "-i", "-", "-o", "-"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(batch_line("a", prompt="x"))))
    with pytest.raises(SystemExit) as leaving:
        main()
    assert not leaving.value.code
    assert answer_texts(json.loads(capsys.readouterr().out)) == ["<x>"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "-i and -o are both needed"),
        (("-i", "in.jsonl"), "-i and -o are both needed"),
        (
            ("-i", "missing.jsonl", "-o", "out.jsonl"),
            "cannot read missing.jsonl: No such file or directory",
        ),
        (("-i", "in.jsonl", "-o", "in.jsonl"), "in.jsonl is given as input and as output"),
        (
            ("-i", "in.jsonl", "-o", "none/out.jsonl"),
            "cannot write none/out.jsonl: there is no folder none",
        ),
        (("-i", "in.jsonl", "-o", "."), "cannot write .: Is a directory"),
    ],
)
def test_unusable_input_and_output_files_are_rejected(
    monkeypatch, capsys, tmp_path, arguments, message
):
    monkeypatch.setattr(quire, "LLM", FakeLLM, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(batch_line("a", prompt="x"))
    monkeypatch.setattr(sys, "argv", ["quire", "run-batch", *arguments])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert (tmp_path / "in.jsonl").read_bytes() == batch_line("a", prompt="x")
