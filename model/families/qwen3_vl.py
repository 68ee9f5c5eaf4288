"""The text part of Qwen3-VL: Qwen3 whose rotary embedding also turns by rows and columns of images."""

from dataclasses import replace

from ..config import ModelConfig
from . import qwen3
from .qwen3_5 import without_sections

THETA = 500000.0


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    return replace(
        qwen3.config({"rope_theta": THETA} | without_sections(hf), max_len), family="qwen3_vl_text"
    )


sources = qwen3.sources
