"""Models that read images, compared with transformers on random weights: tower, greedy tokens and
their log-probabilities.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.gemma3.image_processing_pil_gemma3 import (  # noqa: E402
    Gemma3ImageProcessorPil,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import (  # noqa: E402
    Gemma4ImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import (  # noqa: E402
    PixtralImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: E402
    Qwen2VLImageProcessorPil,
)

from quire import LLM, SamplingParams  # noqa: E402
from quire.model import multimodal  # noqa: E402
from quire.model.images import pixels  # noqa: E402
from quire.model.mixers import LayerHooks  # noqa: E402
from quire.model.towers import checkpoint, tower  # noqa: E402
from quire.serving.device.attend import attend_within  # noqa: E402
from quire.tests.support import tiny_vision  # noqa: E402
from quire.tests.support.tiny_vision import (  # noqa: E402
    IMAGE,
    IMAGE_END,
    ROW_BREAK,
    VISION_END,
    VISION_START,
)

CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_spans": "Gemma4ForConditionalGeneration",
}
NEW_TOKENS = 64


@pytest.fixture(scope="module", params=list(CLASSES))
def model(request, tmp_path_factory):
    """(folder, transformers' model)."""
    folder = tiny_vision.write(tmp_path_factory.mktemp("vision"), request.param)
    model_class = getattr(transformers, CLASSES[request.param])
    return folder, model_class.from_pretrained(folder, dtype=torch.float32).eval()


def processed(reference, images) -> dict:
    """Images as transformers' processor reads them."""
    settings = dict(tiny_vision.PREPROCESSORS[reference.config.model_type])
    kind = settings.pop("image_processor_type")
    if kind == "Qwen2VLImageProcessor":
        return dict(Qwen2VLImageProcessorPil(**settings)(images=list(images), return_tensors="pt"))
    if kind == "Gemma3ImageProcessor":
        inputs = dict(Gemma3ImageProcessorPil(**settings)(images=list(images), return_tensors="pt"))
        return {"pixel_values": inputs["pixel_values"]}
    if kind == "Gemma4ImageProcessor":
        inputs = dict(Gemma4ImageProcessorPil(**settings)(images=list(images), return_tensors="pt"))
        return {key: inputs[key] for key in ("pixel_values", "image_position_ids")}
    side = settings["patch_size"] * reference.config.spatial_merge_size
    processor = PixtralImageProcessorPil(**settings)
    return dict(
        processor(images=[[image] for image in images], patch_size=side, return_tensors="pt")
    )


def reference_rows(reference, pictures) -> list:
    """The rows of all images, and those of a deepstack."""
    inputs = processed(reference, pictures)
    with torch.no_grad():
        if "image_sizes" in inputs:
            output = reference.model.get_image_features(**inputs, vision_feature_layer=-1)
            return [torch.cat(output.pooler_output)]
        if reference.config.model_type == "gemma3":
            return [reference.model.get_image_features(**inputs).pooler_output.flatten(0, 1)]
        if reference.config.model_type == "gemma4":
            return [torch.cat(list(reference.model.get_image_features(**inputs).pooler_output))]
        output = reference.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])
        return [output.pooler_output, *getattr(output, "deepstack_features", ())]


def random_pictures(count: int, seed: int):
    from PIL import Image

    rng = np.random.default_rng(seed)
    return [Image.fromarray(tiny_vision.random_image(rng)) for _ in range(count)]


def test_tower_rows_equal_transformers(model):
    folder, reference = model
    pictures = random_pictures(3, seed=2)
    described = multimodal.read(folder)
    weights = checkpoint.load(folder, described.tower, described.kind)
    images = [
        (pixels.patches(picture, described.rule), *described.rule.grid(*picture.size))
        for picture in pictures
    ]
    size = 4 * sum(len(patches) for patches, *_ in images)  # three quarters are padding
    patches = jax.tree.map(jnp.asarray, tower.patches_of(described.tower, images, size, 5))
    hooks = LayerHooks(attend_within(patches.positions_T, patches.starts_B1, size))
    values_IC = pixels.value_table(described.rule)
    rows = np.asarray(tower.encode(described.tower, weights, values_IC, patches, hooks))
    expected = reference_rows(reference, pictures)
    assert rows.shape[1] == len(expected)
    for column, features in enumerate(expected):
        np.testing.assert_allclose(rows[: len(features), column], features, atol=2e-5)


def place(tokens: list[int], inputs: dict) -> list[int]:
    """The prompt with all tokens of its images."""
    if set(inputs) == {"pixel_values"}:  # all images have as many tokens
        return [token for t in tokens for token in ([t] * 16 if t == IMAGE else [t])]
    patches = (inputs.get("image_position_ids", torch.zeros(0, 1, 2)) >= 0).all(-1).sum(1)
    images = iter(
        [[IMAGE] * (int(count) // 9) for count in patches]
        + [[IMAGE] * (int(grid.prod()) // 4) for grid in inputs.get("image_grid_thw", ())]
        + [
            ([IMAGE] * (int(width) // 8) + [ROW_BREAK]) * (int(height) // 8)
            for height, width in inputs.get("image_sizes", ())
        ]
    )
    placed = []
    for token in tokens:
        placed += next(images) if token == IMAGE else [token]
        if placed[-1] == ROW_BREAK:
            placed[-1] = IMAGE_END
    return placed


def reference_logprobs(reference, prompt: list[int], answer: list[int], inputs: dict):
    """Log-probabilities [len(answer), vocab] of one forward pass over prompt and answer.

    `generate` would continue from the position of a prompt's last token, which is another rule than
    that of `forward` for a prompt that ends in an image.
    """
    ids = torch.tensor([prompt + answer])
    if "image_grid_thw" in inputs or "image_position_ids" in inputs:
        inputs = inputs | {"mm_token_type_ids": (ids == IMAGE).int()}
    if reference.config.model_type == "gemma3":
        inputs = inputs | {"token_type_ids": (ids == IMAGE).int()}
    with torch.no_grad():
        logits = reference(input_ids=ids, **inputs).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1).numpy()


def test_greedy_answers_about_images_equal_transformers(model):
    """Text alone, an image first and last, images of several sizes, two and three images."""
    folder, reference = model
    text = np.random.default_rng(4).integers(0, 256, 12).tolist()
    image = [VISION_START, IMAGE, VISION_END]
    prompts = [
        (text, []),
        ([IMAGE, *text], random_pictures(1, seed=5)),
        ([*text, IMAGE], random_pictures(1, seed=6)),
        ([*text, *image, *text[:3]], random_pictures(1, seed=7)),
        ([*image, *text, *image, *text], random_pictures(2, seed=8)),
        ([*image, *image, 7, *image, *text], random_pictures(3, seed=9)),
    ]
    params = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        allowed_token_ids=list(range(256)),  # no placeholder, which the reference would replace
    )
    with LLM(
        str(folder), dtype="float32", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=96,
        kv_cache_memory_bytes=16 << 20,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [
                {"prompt_token_ids": tokens, "multi_modal_data": {"image": pictures}}
                for tokens, pictures in prompts
            ],
            params,
            use_tqdm=False,
        )
    for (tokens, pictures), output in zip(prompts, outputs, strict=True):
        inputs = processed(reference, pictures) if pictures else {}
        (answer,) = output.outputs
        answer_tokens = list(answer.token_ids)
        assert output.prompt_token_ids == place(tokens, inputs)
        expected = reference_logprobs(reference, output.prompt_token_ids, answer_tokens, inputs)
        assert answer_tokens == expected[:, :256].argmax(axis=1).tolist()
        logprobs = [
            entry[token].logprob
            for entry, token in zip(answer.logprobs, answer_tokens, strict=True)
        ]
        expected_logprobs = expected[np.arange(NEW_TOKENS), answer_tokens]
        # a choice of experts amplifies rounding
        atol = 5e-4 if "moe" in reference.config.model_type else 2e-4
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=atol)
