"""LoRA adapters over HTTP: adapters are models, loaded and unloaded while requests run."""

import json
import shutil
import threading
import urllib.error
import urllib.request

import openai
import pytest

from quire import LLM, LoRARequest, ModelError, SamplingParams
from quire.scripts import options as o
from quire.scripts.serve.command import make_model, parse_adapters
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.tests.support import peft, tiny, tokenizer_zoo
from quire.tests.support.served import model_of, served

OPTIONS = {
    "kv_cache_memory_bytes": 1 << 22,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
}
PROMPT = "adapters"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    core = tokenizer_zoo.byte_level()
    config = tiny.LLAMA | {"vocab_size": core.get_vocab_size(), "max_position_embeddings": 512}
    tensors = tiny.write(root / "base", config, tiny.even(tiny.shapes(config)))
    tokenizer_zoo.save(root / "base", core, "{% for m in messages %}{{ m.content }}{% endfor %}")
    for number in range(4):
        peft.write(root / "allowed" / f"a{number}", peft.draw(tensors, seed=number))
    peft.write(root / "outside", peft.draw(tensors, seed=9))
    (root / "allowed" / "link").symlink_to(root / "outside")
    return root


@pytest.fixture(scope="module")
def engine(folders):
    return make_engine(make_options(str(folders / "base"), **OPTIONS))


@pytest.fixture(scope="module")
def expected_texts(folders, engine):
    """The text of the Python API for each adapter."""
    llm = LLM(engine=engine)
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = {None: llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text}
    for number in range(4):
        request = LoRARequest("x", 1, str(folders / "allowed" / f"a{number}"))
        output = llm.generate(PROMPT, params, use_tqdm=False, lora_request=request)
        texts[number] = output[0].outputs[0].text
    assert len(set(texts.values())) == 5
    return texts


@pytest.fixture(scope="module")
def server(folders, engine, expected_texts):
    model = model_of(engine, "base")
    model.adapters["first"] = LoRARequest("first", 1, str(folders / "allowed" / "a0"))
    with served(model, admin=True, lora_dir=str(folders / "allowed")) as state:
        state.client = openai.OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0)
        yield state


def send_request(state, path: str, body: dict | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(state.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def completion_text(state, model: str) -> str:
    answer = state.client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=8
    )
    assert answer.model == model
    return answer.choices[0].text


@pytest.mark.slow
def test_adapter_names_are_models(server, expected_texts):
    """Listed with their parent in /v1/models, and used in chat, completions and embeddings,
    streamed or not.
    """
    cards = {card.id: card for card in server.client.models.list().data}
    assert (
        cards["first"].parent == "base"
        and cards["base"].parent is None
        and cards["first"].root == "first"
    )
    assert server.client.models.retrieve("first").id == "first"
    assert (completion_text(server, "base"), completion_text(server, "first")) == (
        expected_texts[None],
        expected_texts[0],
    )
    chat = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 8}
    response = server.client.chat.completions.create(model="first", **chat)
    streamed = list(server.client.chat.completions.create(model="first", stream=True, **chat))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        == response.choices[0].message.content
    )
    assert {chunk.model for chunk in streamed} == {response.model} == {"first"}
    base_response = server.client.chat.completions.create(model="base", **chat)
    assert base_response.choices[0].message.content != response.choices[0].message.content
    vectors = [
        server.client.embeddings.create(model=name, input="x").data[0].embedding
        for name in ("base", "first")
    ]
    assert vectors[0] != vectors[1]


def test_adapter_with_structured_outputs(server):
    request_fields = {
        "prompt": PROMPT,
        "max_tokens": 20,
        "extra_body": {"structured_outputs": {"regex": "[0-9]{4}"}},
    }
    for name in ("base", "first"):
        text = server.client.completions.create(model=name, **request_fields).choices[0].text
        assert len(text) == 4 and text.isdigit()


def test_adapter_unloaded_during_a_request(server, expected_texts):
    """The running request finishes with the adapter; the next request is a 404."""
    status, text = send_request(
        server, "/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "a1"}
    )
    assert (status, text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert completion_text(server, "second") == expected_texts[1]
    long_request = {"model": "second", "prompt": PROMPT, "temperature": 0, "max_tokens": 200}
    long_request["extra_body"] = {"ignore_eos": True}
    expected_text = server.client.completions.create(**long_request).choices[0].text
    stream = server.client.completions.create(stream=True, **long_request)
    chunk_texts = [next(stream).choices[0].text]
    assert send_request(server, "/v1/unload_lora_adapter", {"lora_name": "second"})[0] == 200
    with pytest.raises(openai.NotFoundError, match="there is no 'second'"):
        completion_text(server, "second")
    chunk_texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(chunk_texts) == expected_text
    assert "second" not in {card.id for card in server.client.models.list().data}
    assert send_request(server, "/v1/unload_lora_adapter", {"lora_name": "second"})[0] == 404


def test_more_adapters_than_slots(server, expected_texts):
    """Concurrent clients get their own adapters' texts, without recompilation."""
    for number in range(4):
        body = {"lora_name": f"many-{number}", "lora_path": f"a{number}"}
        assert send_request(server, "/v1/load_lora_adapter", body)[0] == 200
    texts: dict[int, list[str]] = {number: [] for number in range(4)}

    def request_adapter(number: int) -> None:
        for _ in range(4):
            texts[number].append(completion_text(server, f"many-{number}"))

    threads = [threading.Thread(target=request_adapter, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [expected_texts[number]] * 4 for number in range(4)}
    metrics = send_request(server, "/metrics")[1]
    assert 'quire:recompiles_total{model_name="base"} 0.0' in metrics


def test_load_inplace_replaces_an_adapter(server, folders, expected_texts):
    shutil.copytree(folders / "allowed" / "a2", folders / "allowed" / "changing")
    body = {"lora_name": "changing", "lora_path": "changing"}
    assert send_request(server, "/v1/load_lora_adapter", body)[0] == 200
    assert completion_text(server, "changing") == expected_texts[2]
    status, text = send_request(server, "/v1/load_lora_adapter", body)
    assert status == 400 and "is served already" in text
    shutil.copytree(
        folders / "allowed" / "a3", folders / "allowed" / "changing", dirs_exist_ok=True
    )
    assert send_request(server, "/v1/load_lora_adapter", body | {"load_inplace": True})[0] == 200
    assert completion_text(server, "changing") == expected_texts[3]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, 400, "must be a folder below --lora-dir"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "must be a folder below --lora-dir"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "must be a folder below --lora-dir"),
        ({"lora_name": "x", "lora_path": "a1/adapter_config.json"}, 400, "must be a folder below"),
        ({"lora_name": "x", "lora_path": "a\u00001"}, 400, "printable characters"),
        ({"lora_name": "x", "lora_path": "."}, 400, "must be a folder below"),
        ({"lora_name": "base", "lora_path": "a1"}, 400, "'base' is served already"),
        ({"lora_name": "", "lora_path": "a1"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "a1", "load_inplace": 1}, 400, "load_inplace"),
        ({"lora_name": "x", "lora_path": "a1", "rank": 1}, 400, "rank"),
        ([], 400, "body"),
    ],
)
def test_invalid_load_requests_are_rejected(server, folders, body, status, message):
    actual_status, text = send_request(server, "/v1/load_lora_adapter", body)
    assert actual_status == status and message in text and str(folders) not in text


def test_adapter_names_are_not_paths(server, folders):
    for name in ("../outside", str(folders / "outside"), "allowed/a1", "a1", "link"):
        with pytest.raises(openai.NotFoundError):
            completion_text(server, name)


def test_error_of_deleted_adapter_hides_its_path(server, folders, expected_texts):
    shutil.copytree(folders / "allowed" / "a2", folders / "allowed" / "gone")
    assert (
        send_request(server, "/v1/load_lora_adapter", {"lora_name": "gone", "lora_path": "gone"})[0]
        == 200
    )
    shutil.rmtree(folders / "allowed" / "gone")
    with pytest.raises(openai.InternalServerError, match="adapter gone cannot be read") as error:
        completion_text(server, "gone")
    assert error.value.status_code == 503 and str(folders) not in str(error.value)


def test_loading_adapters_needs_lora_dir(engine, folders):
    from quire.serving.http.endpoints.adapters import resolve_adapter_folder
    from quire.serving.http.errors import HttpError
    from quire.serving.http.models import Models
    from quire.serving.http.service import Service
    from quire.serving.http.settings import ServerSettings

    service = Service(Models([model_of(engine)]), ServerSettings(admin=True))
    with pytest.raises(HttpError, match="--lora-dir") as error:
        resolve_adapter_folder(service, "a1")
    assert error.value.status == 403


def test_lora_modules_option(folders):
    assert parse_adapters(["a=/x", "b=y=z"], [("m",)], True) == {"a": "/x", "b": "y=z"}
    for flags, model_names, is_enabled, message_pattern in (
        (["a"], [("m",)], True, "it must be NAME=PATH"),
        (["a=x", "a=y"], [("m",)], True, "names 'a'"),
        (["m=x"], [("m",)], True, "names 'm'"),
        (["a=x"], [("m",)], False, "needs --enable-lora"),
        (["a=x"], [("m",), ("n",)], True, "needs a single MODEL"),
    ):
        with pytest.raises(o.UsageError, match=message_pattern):
            parse_adapters(flags, model_names, is_enabled)
    model = make_model(str(folders / "base"), ("base",), OPTIONS, {"a": str(folders / "nowhere")})
    with pytest.raises(ModelError, match="no adapter that can be read"):
        model.make()
