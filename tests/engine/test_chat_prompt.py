"""Prompts of `continue_final_message`, which end with the last message."""

import pytest

from quire.model.text.chat_template import ChatTemplate
from quire.serving.api.errors import RequestError
from quire.serving.chat_prompt import render
from quire.tests.support.chat_templates import CASES

QUESTION = {"role": "user", "content": "count"}
CONTINUE_OPTIONS = {"continue_final_message": True, "add_generation_prompt": False}


class FakeTokenizer:
    """Has those methods of a tokenizer that `render` uses."""

    def __init__(self):
        self.template = ChatTemplate("", {"bos_token": "<s>", "eos_token": "</s>"})

    def template_for(self, tools) -> str:
        return self.template.source

    def apply_chat_template(self, messages, **variables) -> str:
        return self.template.render(messages, **variables)


@pytest.fixture(scope="module")
def render_continued():
    tokenizer = FakeTokenizer()

    def run(template: str, content: str) -> str:
        tokenizer.template.source = CASES[template].template
        messages = [QUESTION, {"role": "assistant", "content": content}]
        return render(tokenizer, messages, [], CONTINUE_OPTIONS)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(
    ("template", "content", "expected_end"),
    [
        ("chatml", "Hel", "assistant\nHel"),
        ("chatml", "e", "assistant\ne"),  # `<|im_end|>` contains an e too
        ("chatml", "<", "assistant\n<"),
        ("chatml", "count", "assistant\ncount"),
        ("phi", " So, \n", "<|assistant|>\n So, \n"),
        ("llama", " So, \n", "assistant<|/header|>\n\nSo,"),  # the template trims contents
        ("gemma", "t", "model\nt"),
        ("mistral", "I ", "[/INST] I"),
    ],
)
def test_continued_prompt_ends_with_the_last_message(
    render_continued, template, content, expected_end
):
    assert render_continued(template, content).endswith(expected_end)


@pytest.mark.parametrize(
    ("template", "content"), [("chatml", " "), ("harmony", "<think>a</think>b")]
)
def test_message_omitted_by_the_template_cannot_be_continued(render_continued, template, content):
    with pytest.raises(
        RequestError, match="^continue_final_message: .*does not show the last message"
    ):
        render_continued(template, content)
