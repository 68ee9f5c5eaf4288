"""Compares rendered prompts with those of transformers, for all templates and conversations."""

import pytest

from quire.tests.support.chat_templates import AGAIN, ANSWER, ASK, CASES
from quire.tests.support.template_features import EXPRESSED, EXPRESSIONS, FEATURES, PRINTED

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quire.model.text.chat_template import ChatTemplate
from quire.serving.chat_prompt import render

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ALL_CASES = CASES | FEATURES
TEMPLATES = {
    name: template
    for template, name in {case.template: name for name, case in ALL_CASES.items()}.items()
}


@pytest.fixture(scope="module")
def transformers_prompt():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL_TOKENS)

    def prompt(template: str, messages, **options) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, **options
        )

    return prompt


@pytest.fixture(scope="module")
def quire_prompt():
    chat = ChatTemplate("", SPECIAL_TOKENS)

    def prompt(template: str, messages, **options) -> str:
        chat.source = template
        return chat.render(messages, **options)

    return prompt


@pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES)
def test_recorded_prompts_equal_those_of_transformers(case, transformers_prompt):
    options = {"add_generation_prompt": case.add_generation_prompt} | case.variables
    assert transformers_prompt(case.template, case.messages, **options) == case.expected


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_recorded_expressions_equal_those_of_transformers(source, transformers_prompt):
    assert transformers_prompt(source, EXPRESSED) == EXPRESSIONS[source]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_all_templates_render_all_conversations_like_transformers(
    template, transformers_prompt, quire_prompt
):
    """Where transformers raises an error, Quire may render a prompt: the missing content of an
    assistant's message is empty here and undefined there.
    """
    for case in ALL_CASES.values():
        for adds_prompt in (True, False):
            for variables in (
                {},
                case.variables,
                {"tools": [{"type": "function", "function": {"name": "f"}}]},
            ):
                options = {"add_generation_prompt": adds_prompt} | variables
                try:
                    expected = transformers_prompt(template, case.messages, **options)
                except Exception:
                    continue
                assert quire_prompt(template, case.messages, **options) == expected


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
def test_line_endings_are_rendered_like_transformers(line_end, transformers_prompt, quire_prompt):
    for case in ALL_CASES.values():
        template = case.template.replace("\n", line_end)
        for messages in (case.messages, [ASK, ANSWER, {"role": "user", "content": "a\r\nb\rc"}]):
            assert quire_prompt(template, messages, **case.variables) == transformers_prompt(
                template, messages, add_generation_prompt=True, **case.variables
            )


@pytest.mark.parametrize("content", ["So", "e", "<", " t ", "I\n\n", "count"])
def test_continued_messages_are_rendered_like_transformers(
    content, transformers_prompt, quire_prompt
):
    class Tokenizer:
        template_for = staticmethod(lambda tools: template)
        apply_chat_template = staticmethod(
            lambda messages, **options: quire_prompt(template, messages, **options)
        )

    messages = [AGAIN, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for template in TEMPLATES.values():
        if template != PRINTED:  # a template that prints no content
            assert render(Tokenizer, messages, [], options) == transformers_prompt(
                template, messages, **options
            )
