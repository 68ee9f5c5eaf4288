"""Formats of reasoning before an answer: one description, by which it is read and its grammar is
written.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .pieces import ReasoningPiece, TextPiece
from .reader import FormatError, Reader, hold_blank, hold_marker, read_text


@dataclass(frozen=True)
class Thoughts:
    """The markers around a thought. A model should write the first of several; all are read."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    # The answer starts within a thought unless the prompt has closed one.
    starts_inside: bool = False
    other_closes: tuple[str, ...] = ()  # a thought ends before these too
    answer: tuple[str, str] | None = None  # optional markers around the rest
    keeps_special: bool = False  # the markers are special tokens
    is_kept: bool = False  # the thought stays a part of the answer, with its opening marker

    def inside(self, opened: bool | None) -> bool:
        """Return whether an answer starts within a thought.

        Args:
            opened: Whether the prompt has opened a thought or closed one; None if neither.
        """
        return self.starts_inside if opened is None else opened

    def read(self, reader: Reader, inside: bool) -> Iterator[None]:
        """Read an answer, which starts `inside` a thought or with its opening marker.

        White space next to the markers is dropped.
        """
        if self.is_kept:
            reader.add(TextPiece, self.opens[0])
            return
        found_marker = None
        yield from hold_blank(reader)
        try:
            found_marker = yield from hold_marker(
                reader, (*self.opens, *self.closes) if inside else self.opens
            )
        except FormatError:
            reader.release(ReasoningPiece if inside else TextPiece)
        if found_marker in self.opens:
            inside = True
            yield from hold_blank(reader)
            reader.drop()
        if inside and found_marker not in self.closes:
            found_marker = yield from read_text(
                reader, (*self.closes, *self.other_closes), ReasoningPiece
            )
        if found_marker in self.closes:
            reader.drop()
            yield from hold_blank(reader)
            reader.drop()
        if self.answer and found_marker not in self.other_closes:
            yield from read_answer(reader, *self.answer)


def read_answer(reader: Reader, begin: str, end: str) -> Iterator[None]:
    """Drop the markers around the answer, with the white space next to them."""
    yield from hold_blank(reader)
    try:
        if not (yield from hold_marker(reader, (begin,))):
            return
    except FormatError:
        reader.release(TextPiece)
        return
    yield from hold_blank(reader)
    reader.drop()
    if (yield from read_text(reader, (end,))):
        reader.drop()
        yield from hold_blank(reader)
        reader.drop()


THINK = Thoughts()
OPENED = Thoughts(starts_inside=True)
REASONING: dict[str, Thoughts | str | None] = {  # by vLLM's names
    "cohere_command3": Thoughts(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        keeps_special=True,
    ),
    "deepseek_r1": OPENED,
    "deepseek_v3": THINK,
    "deepseek_v4": THINK,
    "ernie45": Thoughts(answer=("<response>", "</response>")),
    "gemma4": Thoughts(("<|channel>thought",), ("<channel|>",), keeps_special=True),
    "glm45": THINK,
    "glm47": THINK,
    "gptoss": ".harmony",
    "granite": Thoughts(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    "holo2": THINK,
    "hunyuan_a13b": Thoughts(answer=("<answer>", "</answer>")),
    "identity": None,
    "kimi_k2": Thoughts(other_closes=("<|tool_calls_section_begin|>",), keeps_special=True),
    "mimo": THINK,
    "minimax_m2": OPENED,
    "minimax_m2_append_think": Thoughts(is_kept=True),
    "mistral": Thoughts(("[THINK]",), ("[/THINK]",), keeps_special=True),
    "nemotron_v3": THINK,
    "olmo3": OPENED,
    "openai_gptoss": ".harmony",
    "poolside_v1": THINK,
    "qwen3": THINK,
    "seed_oss": Thoughts(("<seed:think>",), ("</seed:think>",)),
    "step3": OPENED,
    "step3p5": OPENED,
}
REFUSED_REASONING = {  # vLLM's name -> why it is not supported
    "cohere_command4": "its format is defined only in a library of Cohere",
    "hy_v3": "its tags have a suffix that only its tokenizer defines",
    "inkling": "its format is not supported yet",
    "kimi_k3": "its format is not supported yet; kimi_k2 supports earlier models",
    "minimax_m3": "its format is not supported yet; minimax_m2 supports earlier models",
    "solar_open2": "its reasoning format is not supported yet",
}
# Markers that a chat template of the format contains; the first line with all markers present
# counts.
SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>",), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>",), "gemma4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("Here is my thought process:",), "granite"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>", "<response>"), "ernie45"),
    (("<think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("<think>",), "qwen3"),
    (("</think>",), "qwen3"),
)
