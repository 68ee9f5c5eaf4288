"""The end of a prompt that an answer goes on from."""

import pytest

from quire.model.text.chat_template import ChatTemplate
from quire.serving.api.errors import RequestError
from quire.serving.chat_prompt import render
from quire.tests.support.chat_templates import CASES

ASK = {"role": "user", "content": "count"}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}


class Templates:
    """A tokenizer's part in it."""

    def __init__(self):
        self.template = ChatTemplate("", {"bos_token": "<s>", "eos_token": "</s>"})

    def template_for(self, tools) -> str:
        return self.template.source

    def apply_chat_template(self, messages, **variables) -> str:
        return self.template.render(messages, **variables)


@pytest.fixture(scope="module")
def go_on():
    tokenizer = Templates()

    def run(template: str, said: str) -> str:
        tokenizer.template.source = CASES[template].template
        messages = [ASK, {"role": "assistant", "content": said}]
        return render(tokenizer, messages, [], GOES_ON)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(
    ("template", "said", "end"),
    [
        ("chatml", "Hel", "assistant\nHel"),
        ("chatml", "e", "assistant\ne"),  # which the end of the turn has too
        ("chatml", "<", "assistant\n<"),
        ("chatml", "count", "assistant\ncount"),
        ("phi", " So, \n", "<|assistant|>\n So, \n"),
        ("llama", " So, \n", "assistant<|/header|>\n\nSo,"),  # it trims what is said
        ("gemma", "t", "model\nt"),
        ("mistral", "I ", "[/INST] I"),
    ],
)
def test_the_prompt_ends_where_the_last_message_ends(go_on, template, said, end):
    assert go_on(template, said).endswith(end)


@pytest.mark.parametrize(("template", "said"), [("chatml", " "), ("harmony", "<think>a</think>b")])
def test_what_the_template_does_not_show_cannot_go_on(go_on, template, said):
    with pytest.raises(
        RequestError, match="^continue_final_message: .*does not show the last message"
    ):
        go_on(template, said)
