"""Thoughts before the rest of an answer: one description, from which they are read and a grammar lets them stand."""

from collections.abc import Iterator
from dataclasses import dataclass

from .pieces import Said, Thought
from .reader import Broken, Reader, blank, marker, text


@dataclass(frozen=True)
class Thoughts:
    """What a model writes round them. The first of several texts is what it should write, all are read."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    always: bool = False  # the answer begins within a thought unless the prompt has closed one
    ends: tuple[str, ...] = ()  # a thought ends before these too
    answer: tuple[str, str] | None = None  # what may stand round the rest
    keeps_special: bool = False  # whether these are special tokens
    said: bool = False  # the thought stays a part of the answer, with the text that opens it

    def inside(self, opened: bool | None) -> bool:
        """Whether an answer begins within a thought, if the prompt has `opened` one, closed one or neither."""
        return self.always if opened is None else opened

    def read(self, reader: Reader, inside: bool) -> Iterator[None]:
        """The answer begins `inside` a thought, or with the text that opens one; white space beside that is dropped."""
        if self.said:
            reader.add(Said, self.opens[0])
            return
        found = None
        yield from blank(reader)
        try:
            found = yield from marker(reader, (*self.opens, *self.closes) if inside else self.opens)
        except Broken:
            reader.release(Thought if inside else Said)
        if found in self.opens:
            inside = True
            yield from blank(reader)
            reader.drop()
        if inside and found not in self.closes:
            found = yield from text(reader, (*self.closes, *self.ends), Thought)
        if found in self.closes:
            reader.drop()
            yield from blank(reader)
            reader.drop()
        if self.answer and found not in self.ends:
            yield from answer(reader, *self.answer)


def answer(reader: Reader, begin: str, end: str) -> Iterator[None]:
    """Drop what stands round the answer, with the white space beside it."""
    yield from blank(reader)
    try:
        if not (yield from marker(reader, (begin,))):
            return
    except Broken:
        reader.release(Said)
        return
    yield from blank(reader)
    reader.drop()
    if (yield from text(reader, (end,))):
        reader.drop()
        yield from blank(reader)
        reader.drop()


THINK = Thoughts()
OPENED = Thoughts(always=True)
REASONING: dict[str, Thoughts | str | None] = {  # by the names that users give, which are vLLM's
    "cohere_command3": Thoughts(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
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
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "holo2": THINK,
    "hunyuan_a13b": Thoughts(answer=("<answer>", "</answer>")),
    "identity": None,
    "kimi_k2": Thoughts(ends=("<|tool_calls_section_begin|>",), keeps_special=True),
    "mimo": THINK,
    "minimax_m2": OPENED,
    "minimax_m2_append_think": Thoughts(said=True),
    "mistral": Thoughts(("[THINK]",), ("[/THINK]",), keeps_special=True),
    "nemotron_v3": THINK,
    "olmo3": OPENED,
    "openai_gptoss": ".harmony",
    "poolside_v1": THINK,
    "qwen3": THINK,
    "seed_oss": Thoughts(("<seed:think>",), ("</seed:think>",)),
    "step3": OPENED,
    "step3p5": OPENED,
}  # fmt: skip
REFUSED_REASONING = {  # names that vLLM has -> why they are not here
    "cohere_command4": "its format is only known to a library of Cohere's",
    "hy_v3": "its markers have an ending that only its tokenizer says",
    "inkling": "its format is not written yet",
    "kimi_k3": "its format is not written yet; kimi_k2 reads the models before it",
    "minimax_m3": "its format is not written yet; minimax_m2 reads the models before it",
    "solar_open2": "its thoughts have a format that is not written yet",
}
# What a chat template shows of the format; the first line of which it has all counts.
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
