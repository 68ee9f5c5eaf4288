"""Images over HTTP: OpenAI's client sends them in data: URLs, and unusable ones are refused by
name.
"""

import base64
import io

import anthropic
import numpy as np
import ollama
import openai
import pytest
from openai import OpenAI

from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.models import Model
from quire.serving.http.settings import Formats
from quire.tests.support import tiny_vision
from quire.tests.support.media import data_url
from quire.tests.support.served import served

Image = pytest.importorskip("PIL.Image")

GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tiny_vision.write(tmp_path_factory.mktemp("vision"), "qwen3_vl")
    options = make_options(
        str(folder), max_model_len=400, max_num_seqs=4, max_num_batched_tokens=64, dtype="float32",
        kv_cache_memory_bytes=8 << 20,
    )  # fmt: skip
    model = Model(("eyes",), lambda: make_engine(options))
    with served(model, formats=Formats("none")) as state:
        yield OpenAI(base_url=f"{state.url}/v1", api_key="none", max_retries=0)


def test_every_protocol_reads_images(client):
    """The official clients of four protocols send an image and get the same answer."""
    file = picture(48, 40, seed=3)
    encoded = base64.b64encode(file).decode()
    text = "What is on it?"
    server = str(client.base_url).removesuffix("/v1/")
    chat = client.chat.completions.create(
        model="eyes", temperature=0, max_tokens=8,
        messages=[{"role": "user", "content": [
            image_part(data_url(file)), {"type": "text", "text": text}]}],
    )  # fmt: skip
    expected = chat.choices[0].message.content
    response = client.responses.create(
        model="eyes", temperature=0, max_output_tokens=8,
        input=[{"role": "user", "content": [
            {"type": "input_image", "image_url": data_url(file), "detail": "auto"},
            {"type": "input_text", "text": text}]}],
    )  # fmt: skip
    assert response.output_text == expected
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    message = anthropic.Anthropic(base_url=server, api_key="none").messages.create(
        model="eyes", extra_body={"temperature": 0}, max_tokens=8,
        messages=[{"role": "user", "content": [
            {"type": "image", "source": source}, {"type": "text", "text": text}]}],
    )  # fmt: skip
    assert message.content[0].text == expected
    reader = ollama.Client(host=server)
    assert "vision" in (reader.show("eyes").capabilities or ())
    options = {"temperature": 0, "num_predict": 8}
    messages = [{"role": "user", "content": text, "images": [file]}]
    assert reader.chat("eyes", messages, options=options).message.content == expected
    assert reader.generate("eyes", text, images=[encoded], options=options).response == expected


def test_tool_result_with_an_image_is_read(client):
    """An image in the result of a tool counts as in a message of the user."""
    part = image_part(data_url(picture(48, 40)))
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = client.chat.completions.create(
        model="eyes", temperature=0, max_tokens=4,
        messages=[
            {"role": "user", "content": "Look!"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [part]},
        ],
    )  # fmt: skip
    assert answer.usage.prompt_tokens > (48 // 8) * (40 // 8)


def picture(width: int, height: int, seed: int = 0, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    pixels = tiny_vision.random_image(np.random.default_rng(seed), width, height)
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def ask(client, *parts, **fields):
    content = [{"type": "text", "text": "What is on it?"}, *parts]
    return client.chat.completions.create(
        model="eyes", messages=[{"role": "user", "content": content}], **GREEDY | fields
    )


def image_part(url: str, **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": url} | fields}


def test_openai_client_gets_an_answer_about_an_image(client):
    part = image_part(data_url(picture(48, 40)), detail="high")
    answer = ask(client, part)
    text_only = ask(client)
    rows = (48 // 8) * (40 // 8)
    marks = 2  # the tokens around them
    assert answer.usage.prompt_tokens == text_only.usage.prompt_tokens + rows + marks
    assert answer.usage.completion_tokens == 8
    again = ask(client, part)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > rows
    streamed = ask(client, part, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "GIF", "BMP"])
def test_image_formats_are_read(client, format):
    file = picture(40, 40, format=format)
    assert ask(client, image_part(data_url(file))).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (image_part("http://127.0.0.1/x.png"), "image_url.url", "the server fetches nothing"),
        (image_part("file:///etc/passwd"), "image_url.url", "the server opens no such files"),
        (image_part("data:image/png;base64,%%%"), "image_url.url", "holds invalid base64"),
        (image_part(data_url(b"<svg xmlns='x'/>")), "image_url.url", "format"),
        (image_part(data_url(picture(40, 40)[:60])), "image_url.url", "truncated"),
        (image_part(data_url(picture(1000, 2))), "image_url.url", "at most 200 times"),
        ({"type": "image_pil", "image_pil": "x"}, "image_pil", "must be a PIL image"),
        (image_part(data_url(picture(8, 8)), detail="low"), "detail", "must be 'auto' or 'high'"),
    ],
)
def test_unusable_image_is_a_400_that_names_the_field(client, part, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(client, part)
    assert error.value.param is not None
    assert error.value.param.startswith("messages[0].content[1]")
    assert error.value.param.endswith(param)


def test_placeholder_typed_as_text_is_a_400(client):
    with pytest.raises(openai.BadRequestError, match="comes with 0 images, and the prompt has 1"):
        ask(client, {"type": "text", "text": tiny_vision.PLACEHOLDER})
    with pytest.raises(openai.BadRequestError, match="has a placeholder .* comes without images"):
        client.completions.create(model="eyes", prompt=tiny_vision.PLACEHOLDER, max_tokens=4)


@pytest.mark.parametrize(
    "field", [{"truncate_prompt_tokens": 8}, {"use_beam_search": True, "n": 2}]
)
def test_fields_that_would_lose_an_image_are_refused(client, field):
    part = image_part(data_url(picture(40, 40)))
    with pytest.raises(openai.BadRequestError, match="cannot be used with images") as error:
        ask(client, part, max_tokens=4, extra_body=field)
    assert error.value.param in field
