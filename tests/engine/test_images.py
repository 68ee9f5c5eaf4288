"""Images in prompts: the same bits however a request is served, and no cached prefix of another
image.
"""

import gc
import io
import json
from itertools import pairwise

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.model.config import ModelError
from quire.ops import native
from quire.serving import vision
from quire.serving.api.content import MessageImage
from quire.serving.api.errors import QueueFull, RequestError
from quire.serving.cache.media_store import MediaStore
from quire.serving.device import encode
from quire.serving.engine.beam_search import BeamSearchParams
from quire.serving.media_reader import ImageQueue
from quire.serving.request.media import MediaItem
from quire.tests.support import tiny_vision
from quire.tests.support.media import data_url
from quire.tests.support.tiny_vision import IMAGE, IMAGE_END, VISION_END, VISION_START

pytest.importorskip("PIL")

SMALLER = {  # sizes of images
    "qwen3_vl": {"shortest_edge": 16 * 16, "longest_edge": 32 * 32},
    "qwen3_5": {"shortest_edge": 16 * 16, "longest_edge": 32 * 32},
    "mistral3": {"longest_edge": 32},
}
SPAN_TOKENS = {"gemma4": 70}  # of an image that sees itself whole, at most; 16 in others
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)


@pytest.fixture(
    scope="module", params=["qwen3_vl", "qwen3_5", "mistral3", "gemma3", "gemma4", "gemma4_spans"]
)
def folder(request, tmp_path_factory):
    if not native.serves():
        pytest.skip("XLA sums products in an order that depends on the number of tokens")
    return tiny_vision.write(tmp_path_factory.mktemp("vision"), request.param)


def make_llm(folder, **options) -> LLM:
    defaults = {
        "max_model_len": 400,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 200,
        "kv_cache_memory_bytes": 8 << 20,
        "dtype": "float32",
    }
    return LLM(model=str(folder), **defaults | options)


def llm_kind(folder) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


def fewest_tokens(folder) -> int:
    """The smallest `max_num_batched_tokens` with which models of spans read images."""
    return 16 + SPAN_TOKENS.get(llm_kind(folder), 16)


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def exact_answer(output) -> tuple:
    (answer,) = output.outputs
    logprobs = [sorted((t, e.logprob) for t, e in entry.items()) for entry in answer.logprobs]
    return list(answer.token_ids), logprobs


def answers(llm: LLM, prompts, **fields) -> list[tuple]:
    return [exact_answer(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def prompt_with(rng, images, text_length: int = 20) -> dict:
    """A prompt with random text between, before and after the images."""
    tokens = rng.integers(0, 256, text_length // 2).tolist()
    for _ in images:
        tokens += [VISION_START, IMAGE, VISION_END, *rng.integers(0, 256, 3).tolist()]
    tokens += rng.integers(0, 256, text_length // 2).tolist()
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}


def image_first_and_last(rng) -> dict:
    images = [tiny_vision.random_image(rng), tiny_vision.random_image(rng)]
    return {"prompt_token_ids": [IMAGE, 5, 6, IMAGE], "multi_modal_data": {"image": images}}


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [
        prompt_with(rng, [tiny_vision.random_image(rng)]),
        prompt_with(rng, [tiny_vision.random_image(rng) for _ in range(3)]),
        image_first_and_last(rng),
        {"prompt_token_ids": rng.integers(0, 256, 40).tolist()},
        prompt_with(rng, [tiny_vision.random_image(rng, 200, 300)], 60),
        prompt_with(rng, [tiny_vision.random_image(rng, 8, 8)]),
    ]


@pytest.fixture(scope="module")
def llm(folder, expected):
    """An engine whose encoder computes its layers in blocks, where the expected answers' did not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "BLOCK", {"cpu": 24})
        with make_llm(folder) as llm:
            yield llm


@pytest.fixture(scope="module")
def expected(folder, prompts):
    """The answers of each prompt alone."""
    with make_llm(folder, enable_prefix_caching=False) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in prompts]
        assert llm.engine.runner.compiles.recompiles == 0
    assert any(first != second for (first, _), (second, _) in pairwise(alone))
    return alone


def test_image_answers_do_not_depend_on_the_batch(llm, prompts, expected):
    llm.reset_prefix_cache()
    compiles = llm.engine.runner.compiles
    num_compiled = compiles.recompiles  # of other engines of this process
    assert answers(llm, prompts) == expected
    assert compiles.recompiles == num_compiled


def test_image_answers_do_not_depend_on_a_cached_prefix(llm, prompts, expected):
    llm.reset_prefix_cache()
    for prompt, answer in zip(prompts, expected, strict=True):
        for attempt in range(2):
            (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
            assert exact_answer(output) == answer
            if attempt and len(output.prompt_token_ids) > 2 * 16:
                assert output.num_cached_tokens > 0


def test_image_answers_do_not_depend_on_chunks_and_evicted_rows(
    folder, prompts, expected, monkeypatch
):
    """Steps of few tokens, and a media store with room for one image."""
    monkeypatch.setattr(vision, "STORE_ROWS", 128 if llm_kind(folder) in SPAN_TOKENS else 64)
    num_tokens = fewest_tokens(folder) + 1
    with make_llm(folder, max_num_batched_tokens=num_tokens, enable_prefix_caching=False) as llm:
        for _ in range(2):
            assert answers(llm, prompts) == expected
        num_images = sum(len(p.get("multi_modal_data", {}).get("image", [])) for p in prompts)
        assert llm.engine.runner.media_store.num_encoded > num_images


def test_image_answers_do_not_depend_on_chunks_of_stored_images(folder, prompts, expected, caplog):
    """Steps may begin and end anywhere, but for images that see themselves whole."""
    caplog.set_level("INFO", "quire")
    fewest = fewest_tokens(folder)
    options = {"max_num_batched_tokens": fewest + 1, "enable_prefix_caching": False}
    with make_llm(folder, **options) as llm:
        answers(llm, prompts)
        assert answers(llm, prompts) == expected
        sees_spans = llm.engine.runner.shape.sees_spans
    if sees_spans:  # an image beside 16 samples
        with make_llm(folder, max_num_batched_tokens=fewest - 1) as llm:
            assert not llm.reads_images
        expected_log = f"max_num_batched_tokens is {fewest - 1}, and must be at least {fewest}"
        assert expected_log in caplog.text


def test_preempted_image_request_answers_the_same(llm, prompts, expected):
    llm.reset_prefix_cache()
    requests = [llm.add(prompt, PARAMS) for prompt in prompts[:3]]
    for number in range(60):
        llm.engine.step()
        if number in (2, 5, 9):
            for seq in list(llm.engine.scheduler.running):
                if not seq.pending:
                    llm.engine.scheduler.preempt(seq)
            llm.engine.drain()
            for seq in list(llm.engine.scheduler.running):
                llm.engine.scheduler.preempt(seq)
    assert [exact_answer(request.output()) for request in requests] == expected[:3]


def test_images_are_limited_by_options(folder, prompts):
    options = {
        "limit_mm_per_prompt": {"image": 1},
        "max_image_pixels": 40 * 50,
    }
    if llm_kind(folder) in SMALLER:
        options["mm_processor_kwargs"] = {"size": SMALLER[llm_kind(folder)]}
    large, fitting = (np.zeros((size, 50, 3), np.uint8) for size in (41, 40))
    with make_llm(folder, **options) as llm:
        with pytest.raises(RequestError, match="is image 2 of the prompt; at most 1 are accepted"):
            llm.generate([prompts[1]], PARAMS, use_tqdm=False)
        image_prompt = {"prompt_token_ids": [IMAGE, 5]}
        with pytest.raises(RequestError, match="50 x 41 pixels; at most 2,000 are accepted"):
            llm.generate([image_prompt | {"multi_modal_data": {"image": png(large)}}], PARAMS)
        (output,) = llm.generate(
            [image_prompt | {"multi_modal_data": {"image": png(fitting)}}], PARAMS, use_tqdm=False
        )
        # 32 x 32 pixels at most, 8 x 8 of them a token, or the smallest budget of Gemma 4
        assert output.prompt_token_ids.count(IMAGE) <= SPAN_TOKENS.get(llm_kind(folder), 16)
        assert llm.get_metrics()["quire:images_encoded_total"] == 1
    with pytest.raises(ModelError, match="mm_processor_kwargs has 'do_resize'; of .* it can have"):
        make_llm(folder, mm_processor_kwargs={"do_resize": False})
    with make_llm(folder, limit_mm_per_prompt={"image": 0}) as llm:
        assert llm.engine.runner.media_encoder is None
        assert "quire:images_encoded_total" not in llm.get_metrics()


def test_urls_of_images_are_read_where_they_are_allowed(folder, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(picture_file())
    messages = [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        for url in (path.as_uri(), data_url(path.read_bytes()))
    ]
    with make_llm(folder, allowed_local_media_path=str(tmp_path)) as llm:
        by_path, by_data = llm.chat(messages, PARAMS, use_tqdm=False)
        assert exact_answer(by_path) == exact_answer(by_data)
        remote = {"type": "image_url", "image_url": "https://photos.example/a.png"}
        with pytest.raises(
            RequestError, match="is a URL of 'photos.example', from which the server"
        ):
            llm.chat([{"role": "user", "content": [remote]}], PARAMS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt is"),
        ({"limit_mm_per_prompt": {"video": 1}}, "0 for everything else"),
        ({"max_image_pixels": 0}, "max_image_pixels is 0; it must be an integer of at least 1"),
    ],
)
def test_invalid_image_options_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        LLM(**options)


@pytest.mark.parametrize("fields", [{"method": "ngram"}, {"method": "self", "num_layers": 2}])
def test_image_answers_are_the_same_with_drafts(folder, prompts, expected, fields):
    if fields["method"] == "self" and "qwen3_5" in (folder / "config.json").read_text():
        pytest.skip("this method is refused for models with recurrent layers")
    speculation = {"num_speculative_tokens": 3} | fields
    with make_llm(folder, speculative_config=speculation) as llm:
        for _ in range(2):
            for (tokens, _), (expected_tokens, _) in zip(
                answers(llm, prompts), expected, strict=True
            ):
                assert tokens == expected_tokens


@pytest.mark.parametrize("level", [1, 2])
def test_image_answers_are_the_same_after_sleep(llm, prompts, expected, level):
    llm.sleep(level)
    llm.wake_up()
    assert answers(llm, prompts) == expected


def test_image_prefix_is_restored_from_disk(folder, prompts, expected, tmp_path):
    options = {"kv_cache_disk": str(tmp_path), "kv_cache_host_bytes": 64 << 20}
    with make_llm(folder, **options) as llm:
        assert answers(llm, prompts) == expected
    with make_llm(folder, **options) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [exact_answer(output) for output in outputs] == expected
    # of the prompt with three images
    assert outputs[1].num_cached_tokens > 16


def test_other_image_does_not_match_a_cached_prefix(llm):
    """Pages of one image are never used for another one, in another order, or with another salt."""
    rng = np.random.default_rng(5)
    first, second = (tiny_vision.random_image(rng, 60, 60) for _ in range(2))
    prompt = prompt_with(rng, [first, second])
    start = prompt["prompt_token_ids"].index(IMAGE)
    llm.generate([prompt], PARAMS, use_tqdm=False)
    changed = first.copy()
    changed[0, 0, 0] ^= 255

    def num_cached(images, **fields) -> int:
        changed_prompt = prompt | {"multi_modal_data": {"image": images}} | fields
        (output,) = llm.generate([changed_prompt], PARAMS, use_tqdm=False)
        return output.num_cached_tokens

    assert num_cached([first, second]) > start + 16
    assert num_cached([second, first]) <= start
    assert num_cached([changed, second]) <= start
    assert num_cached([first, second], cache_salt="another tenant") == 0


def picture_file() -> bytes:
    return png(tiny_vision.random_image(np.random.default_rng(3), 50, 40))


def test_chat_reads_pictures_files_and_data_urls(llm):
    from PIL import Image

    file = picture_file()
    image = Image.open(io.BytesIO(file))
    parts = [
        {"type": "image_pil", "image_pil": image},
        {"type": "image_url", "image_url": {"url": data_url(file)}},
        {"type": "input_image", "image_url": data_url(file), "detail": "auto"},
    ]
    outputs = [
        llm.chat(
            [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}], PARAMS
        )[0]
        for part in parts
    ]
    text = llm.image_placeholder() + "What is it?"
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    (generated,) = llm.generate(
        [{"prompt": prompt, "multi_modal_data": {"image": file}}], PARAMS, use_tqdm=False
    )
    assert len({tuple(output.prompt_token_ids) for output in (*outputs, generated)}) == 1
    tokens = generated.prompt_token_ids
    last = max(place for place, token in enumerate(tokens) if token == IMAGE)
    assert tokens[tokens.index(IMAGE) - 1] == VISION_START
    assert tokens[last + 1] in (VISION_END, IMAGE_END)
    for output in outputs:
        assert exact_answer(output) == exact_answer(generated)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "no placeholder", "multi_modal_data": {"image": [np.zeros((8, 8, 3))]}},
         "comes with 1 images, and the prompt has 0 placeholders"),
        ({"prompt": "<|image_pad|>"}, "comes with 0 images, and the prompt has 1"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": np.zeros((8, 8, 3))}},
         r"multi_modal_data: is an array of float64 \[8, 8, 3\]; it must be uint8"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": "file.png"}},
         "multi_modal_data: is 'file.png'; it must be a PIL image"),
        ({"prompt": "<|image_pad|>", "multi_modal_data": {"image": b"<svg>"}},
         "multi_modal_data"),
        ({"prompt": "x", "multi_modal_data": {"video": []}}, "must be {'image': an image"),
        ({"prompt": "<|image_pad|>" * 17,
          "multi_modal_data": {"image": [np.zeros((8, 8, 3), np.uint8)] * 17}},
         "is image 17 of the prompt; at most 16"),
    ],
)  # fmt: skip
def test_invalid_images_are_refused(llm, prompt, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], PARAMS, use_tqdm=False)


def test_beam_search_refuses_images(llm, prompts):
    with pytest.raises(RequestError, match="cannot be used with beam search"):
        llm.beam_search([prompts[0]], BeamSearchParams(beam_width=2, max_tokens=4))


def test_media_store_serves_the_first_sequence_and_evicts_what_nobody_reads():
    """Two sequences, each with an item that fills the store, planned in the same order."""
    store = MediaStore(128, max_pending_rows=100)
    first, second = (MediaItem(digest, np.zeros(0), 1, 1, 128) for digest in range(2))

    def plan() -> list[bool]:
        store.begin_step()
        return [store.request(None, item) for item in (first, second)]

    assert plan() == [False, False]
    assert plan() == [False, False]
    assert store.first_pending() == (None, first)
    store.finish(None, first)
    assert plan() == [True, False]
    assert store.first_pending() is None  # the step reads the only rows
    store.begin_step()
    assert not store.request(None, second)
    store.finish(None, second)
    store.begin_step()
    assert store.request(None, second) and not store.request(None, first)


def test_other_streams_get_tokens_while_an_image_is_encoded(llm, prompts, expected, monkeypatch):
    """A step runs between the halves of the tower's layers, and changes no bit of the rows."""
    monkeypatch.setattr(llm.engine.runner.media_encoder, "products_per_second", 0)
    llm.reset_prefix_cache()
    llm.engine.runner.media_store.forget()
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    text = llm.add(prompts[3], params)
    llm.engine.step()
    image = llm.add(prompts[0], PARAMS)
    (text_seq,), (image_seq,) = text.sequences, image.sequences
    while not image_seq.num_output:
        llm.engine.step()
    assert text_seq.num_output > 2 * llm.engine.runner.media_encoder.num_layers
    while not (text.finished and image.finished):
        llm.engine.step()
    assert exact_answer(image.output()) == expected[0]
    assert list(text.output().outputs[0].token_ids)[:12] == expected[3][0]


def test_model_whose_folder_lacks_the_preprocessor_serves_text(tmp_path, caplog):
    caplog.set_level("INFO", "quire")
    folder = tiny_vision.write(tmp_path, "qwen3_vl")
    (folder / "preprocessor_config.json").unlink()
    with make_llm(folder) as llm:
        assert not llm.reads_images
    assert "text only: preprocessor_config.json is missing" in caplog.text


def test_time_of_a_decode_step_is_known_before_the_first_image(folder):
    with make_llm(folder) as llm:
        assert 0 < llm.engine.step_seconds < 1
        assert llm.engine.runner.media_encoder.products_per_second > 0


def test_image_of_an_aborted_request_is_not_encoded(llm, prompts, expected, monkeypatch):
    llm.reset_prefix_cache()
    runner = llm.engine.runner
    monkeypatch.setattr(runner.media_encoder, "products_per_second", 0)
    runner.media_store.forget()
    num_encoded = runner.media_store.num_encoded
    aborted = llm.add(prompts[4], PARAMS)
    for _ in range(2):
        llm.engine.step()
    assert runner.encoding is not None
    llm.abort([aborted])
    assert answers(llm, prompts[:1]) == expected[:1]
    assert runner.media_store.num_encoded == num_encoded + 1


def test_failed_encoder_ends_only_the_requests_of_the_image(llm, prompts, expected, monkeypatch):
    llm.reset_prefix_cache()
    llm.engine.runner.media_store.forget()
    texts = [llm.add(prompts[3], PARAMS) for _ in range(2)]
    llm.engine.step()

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(encode.Encoding, "advance", fail)
    image = llm.add(prompts[0], PARAMS)
    while not image.finished:
        llm.engine.step()
    assert image.output().outputs[0].finish_reason == "error"
    monkeypatch.undo()
    while not all(text.finished for text in texts):
        llm.engine.step()
    assert [exact_answer(text.output()) for text in texts] == [expected[3]] * 2
    assert answers(llm, prompts[:1]) == expected[:1]


def test_clients_images_are_bounded_while_requests_hold_them(llm):
    reader = llm.engine.media_reader
    content = MessageImage("image", picture_file())
    tokens = [5, IMAGE]
    _, media = reader.read(tokens, [content])
    image_bytes = media.spans[0].item.patches.nbytes
    queue = reader.queue = ImageQueue(max_requests=1, max_bytes=2 * image_bytes)
    _, media = reader.read(tokens, [content], is_client=True)
    assert queue.num_bytes == image_bytes
    with pytest.raises(QueueFull, match="images of waiting requests take"):
        for _ in range(3):
            media = media, reader.read(tokens, [content], is_client=True)
    with queue, pytest.raises(QueueFull, match="images of 1 requests are being read"):
        reader.read(tokens, [content], is_client=True)
    del media
    gc.collect()
    assert (queue.num_bytes, queue.num_requests) == (0, 0)
    reader.queue = ImageQueue()


def test_language_model_only_serves_text(folder, prompts, expected):
    with make_llm(folder, language_model_only=True) as llm:
        assert llm.engine.runner.media_encoder is None
        assert answers(llm, [prompts[3]]) == [expected[3]]
        with pytest.raises(RequestError, match="this model reads text only"):
            llm.generate([prompts[0]], PARAMS, use_tqdm=False)
