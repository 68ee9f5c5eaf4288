"""Runner for OpenVINO GenAI on CPUs: its continuous batching pipeline, with weights compressed by
its exporter.
"""

# pyright: reportMissingImports=false

import math
from collections.abc import Callable
from pathlib import Path

from .loop import LoadSettings, TimedPrompt, TimedTokens, drive

COMPRESSION = {
    "bf16": None,
    "int8": {"bits": 8, "sym": False},
    "int4": {"bits": 4, "sym": False, "group_size": 128},
    "int4-32": {"bits": 4, "sym": False, "group_size": 32},
}


def prepare(settings: LoadSettings) -> None:
    if settings.drafts or settings.adapters:
        raise NotImplementedError("its drafts and adapters are not compared")
    if settings.weights not in COMPRESSION:
        raise NotImplementedError(f"{settings.weights} is not a format of its own")
    folder = Path(settings.prepared) / settings.weights
    if (folder / "done").is_file():
        return
    choice = COMPRESSION[settings.weights]
    if choice is None:
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        main_export(
            settings.model,
            folder,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype="fp16"),
        )
    else:  # `main_export` does not quantise, even with a `quantization_config`
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        model = OVModelForCausalLM.from_pretrained(
            settings.model,
            export=True,
            compile=False,
            quantization_config=OVWeightQuantizationConfig(**choice),
        )
        model.save_pretrained(folder)
    require_compressed(folder, Path(settings.model), 2 if choice is None else 1)
    (folder / "done").touch()


def require_compressed(folder: Path, model: Path, bytes_per_weight: int) -> None:
    """Raise an error if the exported weights are larger than they should be."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "np") as file:
        names = file.keys()
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    size = (folder / "openvino_model.bin").stat().st_size
    if size > 1.1 * bytes_per_weight * count:
        raise RuntimeError(
            f"{folder} has {size} bytes of weights for {count} parameters, which is more than "
            f"{bytes_per_weight} a parameter: the exporter did not compress them"
        )


def score(settings: LoadSettings, tokens: list[int]):
    """Logits [T, V] of the next token after each token."""
    import numpy as np
    import openvino as ov

    path = Path(settings.prepared) / settings.weights / "openvino_model.xml"
    request = ov.Core().compile_model(str(path), "CPU").create_infer_request()
    ids = np.array([tokens], np.int64)
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(len(tokens))[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return request.infer(inputs)["logits"][0]


def load(settings: LoadSettings) -> Callable[[list[TimedPrompt]], list[TimedTokens]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    limits = genai.SchedulerConfig()
    limits.cache_size = 2  # GB
    limits.max_num_seqs = settings.max_seqs
    # The same as Quire; with OpenVINO's default of 256 long prompts take longer.
    limits.max_num_batched_tokens = 512
    limits.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        str(Path(settings.prepared) / settings.weights),
        limits,
        "CPU",
        {"INFERENCE_NUM_THREADS": settings.threads},
    )
    ids = iter(range(1 << 30))

    def serve(requests: list[TimedPrompt]) -> list[TimedTokens]:
        handles: dict[int, genai.GenerationHandle] = {}

        def add(index: int, request: TimedPrompt) -> None:
            config = genai.GenerationConfig()
            config.max_new_tokens = request.count
            config.ignore_eos = True
            config.do_sample = False
            tokens = ov.Tensor(np.array([request.prompt], np.int64))
            handles[index] = pipeline.add_request(next(ids), tokens, config)

        def step():
            pipeline.step()
            for index, handle in list(handles.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        yield index, list(output.generated_ids)

        return drive(requests, add, step)

    return serve
