"""Prompts against those of transformers: each template with its own conversation and with all
others.
"""

import pytest

from quire.tests.support.chat_templates import AGAIN, ANSWER, ASK, CASES
from quire.tests.support.template_features import EXPRESSED, EXPRESSIONS, FEATURES, PRINTED

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quire.model.text.chat_template import ChatTemplate
from quire.serving.chat_prompt import render

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ALL = CASES | FEATURES
TEMPLATES = {
    name: template for template, name in {case.template: name for name, case in ALL.items()}.items()
}


@pytest.fixture(scope="module")
def theirs():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)

    def prompt(template: str, messages, **options) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )

    return prompt


@pytest.fixture(scope="module")
def ours():
    chat = ChatTemplate("", SPECIAL)

    def prompt(template: str, messages, **options) -> str:
        chat.source = template
        return chat.render(messages, **options)

    return prompt


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_the_recorded_prompts_are_theirs(case, theirs):
    options = {"add_generation_prompt": case.add_generation_prompt} | case.variables
    assert theirs(case.template, case.messages, **options) == case.expected


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_the_recorded_expressions_are_theirs(source, theirs):
    assert theirs(source, EXPRESSED) == EXPRESSIONS[source]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_conversation(template, theirs, ours):
    """Where theirs refuses, ours may find a prompt: what an assistant did not say is empty here and
    missing there.
    """
    for case in ALL.values():
        for adds in (True, False):
            for variables in (
                {},
                case.variables,
                {"tools": [{"type": "function", "function": {"name": "f"}}]},
            ):
                options = {"add_generation_prompt": adds} | variables
                try:
                    expected = theirs(template, case.messages, **options)
                except Exception:
                    continue
                assert ours(template, case.messages, **options) == expected


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_line_ends(ends, theirs, ours):
    for case in ALL.values():
        template = case.template.replace("\n", ends)
        for messages in (case.messages, [ASK, ANSWER, {"role": "user", "content": "a\r\nb\rc"}]):
            assert ours(template, messages, **case.variables) == theirs(
                template, messages, add_generation_prompt=True, **case.variables
            )


@pytest.mark.parametrize("said", ["So", "e", "<", " t ", "I\n\n", "count"])
def test_an_answer_goes_on_from_the_same_place(said, theirs, ours):
    class Tokenizer:
        template_for = staticmethod(lambda tools: template)
        apply_chat_template = staticmethod(
            lambda messages, **options: ours(template, messages, **options)
        )

    messages = [AGAIN, {"role": "assistant", "content": said}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for template in TEMPLATES.values():
        if template != PRINTED:  # which shows no content
            assert render(Tokenizer, messages, [], options) == theirs(template, messages, **options)
