"""The page at `/`, in a browser, against a server whose answers are scripted."""

import base64
import io
import json
import re
import time
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from quire.tests.support.browser import CHROMIUM, FLAGS, Tab, needs_chromium, until
from quire.tests.support.cases import cases
from quire.tests.support.page_server import PAGE, STORY, StandIn, said, serving, token, words

HOSTILE_HTML = (
    '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script><b '
    "onclick='x'>&amp; **bold**"
)
CELL_PITCH = 22  # pixels between cells in a map of few cells

pytestmark = needs_chromium
expect.set_options(timeout=60_000)


def live_frame(
    cells: list[int], running: tuple[dict[str, Any], ...] = (), **changes: Any
) -> dict[str, Any]:
    """An event of /live."""
    return {
        "model": "quill",
        "state": "ready",
        "page_size": 16,
        "limits": {"max_seqs": 32, "max_rows": 512, "max_len": 1024},
        "defaults": {},
        "groups": [{"name": "full", "pages": len(cells), "each": 1, "cells": cells}],
        "used": 0.34,
        "running": list(running),
        "waiting": [],
        "num_running": len(running),
        "num_waiting": 0,
        "steps": [],
        "drafts": None,
        "totals": {
            "requests": 12,
            "prompt_tokens": 4000,
            "generation_tokens": 7,
            "cached_tokens": 1000,
            "preemptions": 0,
            "recompiles": 0,
        },
        "rates": {"generation": 812.5, "prompt": 120.0},
        "latency": {"ttft": None, "itl": [8.21, 9.0, 1234.5]},
        **changes,
    }


def running_request(number: int, **changes: Any) -> dict[str, Any]:
    """A running request, as /live events describe it."""
    request = {
        "number": number,
        "id": f"chatcmpl-{number}",
        "prompt": 120,
        "cached": 64,
        "computed": 120,
        "tokens": 45,
    }
    return request | {"state": "writing"} | changes


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn(frame=live_frame([0] * 60))


@pytest.fixture
def url(stand_in: StandIn) -> Iterator[str]:
    """The URL of the stand-in server."""
    with serving(stand_in) as url:
        yield url


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    yield context
    context.close()


@pytest.fixture
def tab(context: BrowserContext, url: str, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A connected page.

    Tests in which the server answers with error statuses use the fixture `expects_http_errors`.
    """
    tab = Tab(context.new_page(), url)
    expect(tab.state).to_have_attribute("data-state", "ready")
    yield tab
    tab.check("expects_http_errors" in request.fixturenames)


@pytest.fixture
def expects_http_errors() -> None:
    """The browser may log HTTP errors in this test."""


@pytest.fixture(scope="module")
def module_page(browser: Browser) -> Iterator[Page]:
    """A page for calling its JavaScript modules directly."""
    with serving(StandIn(frame=live_frame([0]))) as url:
        page = browser.new_page()
        page.goto(url)
        page.evaluate(
            """async () => { window.lib = {...await import("/page/tokens.js"), ...await import("/page/markdown.js"),
                ...await import("/page/pages.js")} }"""
        )
        yield page
        page.close()


# The chat


def test_streamed_answer_is_shown_with_statistics(tab: Tab, stand_in: StandIn):
    stand_in.answers["Hello"] = [*list(words(STORY))[:5], 0.5, *list(words(STORY))[5:], "stop"]
    tab.ask("Hello")
    expect(tab.page.locator(".answer .text")).to_contain_text(
        "Once upon a time"
    )  # before the answer ends
    expect(tab.page.locator("#send")).to_have_attribute("aria-label", "Stop")
    tab.ended()
    assert tab.answer() == STORY
    assert tab.page.locator(".answer .text p").count() == 2
    footer_text = tab.page.locator(".answer .foot").inner_text()
    assert re.search(r"\b74 tokens\b", footer_text) and re.search(r"[\d,.]+ tokens/s", footer_text)
    assert (
        "to the first token" in footer_text
        and "32 of 40 prompt tokens from the cache" in footer_text
    )
    assert tab.page.locator("#context").inner_text() == "114 of 1,024 tokens"
    (body,) = stand_in.bodies
    assert re.fullmatch("page-[0-9a-f]{16}", body.pop("request_id"))
    assert body == {
        "model": "quill", "messages": [{"role": "user", "content": "Hello"}], "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 5,
    }  # fmt: skip


def image_file(name: str, width: int, height: int, mode: str = "RGB") -> dict[str, Any]:
    """A file as Playwright passes it to a file input."""
    file = io.BytesIO()
    Image.new(mode, (width, height), (200, 30, 30, 0)[: len(mode)]).save(file, "PNG")
    return {"name": name, "mimeType": "image/png", "buffer": file.getvalue()}


def give_files(tab: Tab, event: str, selector: str, files: list[dict[str, Any]]) -> None:
    """Paste or drop files."""
    script = """([selector, event, files]) => {
        const data = new DataTransfer();
        for (const [name, type, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, {type}));
        const options = {bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data};
        const kind = event === "paste" ? ClipboardEvent : DragEvent;
        document.querySelector(selector).dispatchEvent(new kind(event, options)) }"""
    contents = [[file["name"], file["mimeType"], list(file["buffer"])] for file in files]
    tab.page.evaluate(script, [selector, event, contents])


def sent_image(url: str) -> Image.Image:
    assert url.startswith("data:image/jpeg;base64,")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_images_are_attached_and_sent(tab: Tab, stand_in: StandIn):
    """Chosen, pasted and dropped; shrunk, removed, limited, kept for the next visit."""
    expect(tab.page.locator("#attach")).to_be_hidden()
    frame = live_frame([0] * 60)
    stand_in.frame = frame | {"limits": frame["limits"] | {"max_images": 2}}
    expect(tab.page.locator("#attach")).to_be_visible()
    attached = tab.page.locator("#attached img")
    tab.page.set_input_files("#image-files", [image_file("chosen.png", 3000, 300, "RGBA")])
    expect(attached).to_have_count(1)
    give_files(tab, "paste", "#prompt", [image_file("pasted.png", 40, 30)])
    expect(attached).to_have_count(2)
    give_files(tab, "drop", "#chat", [image_file("dropped.png", 10, 10)])
    expect(tab.page.locator("#said")).to_have_text("The model reads at most 2 images.")
    tab.ask("What is it?")
    tab.ended()
    *images, text = stand_in.bodies[-1]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    first, second = (sent_image(image["image_url"]["url"]) for image in images)
    assert (first.size, second.size) == ((1536, 154), (40, 30))
    assert np.asarray(first).min() > 250  # transparent parts are white
    red, green, blue = np.asarray(second)[15, 20]
    assert red > 180 and green < 60 and blue < 60
    expect(attached).to_have_count(0)
    expect(tab.page.locator(".asked .images img")).to_have_count(2)
    expect(tab.page.locator("#attach")).to_be_hidden()  # the conversation has as many as it may
    stand_in.frame = frame | {"limits": frame["limits"] | {"max_images": 4}}
    tab.page.reload()
    expect(tab.page.locator(".asked .images img")).to_have_count(2)
    expect(tab.page.locator("#attach")).to_be_visible()
    give_files(tab, "drop", "#chat", [image_file("dropped.png", 10, 10)])
    expect(attached).to_have_count(1)
    tab.page.click("#attached .tool")
    expect(attached).to_have_count(0)
    expect(tab.page.locator("#send")).to_be_disabled()
    give_files(tab, "paste", "#prompt", [image_file("alone.png", 10, 10)])
    expect(attached).to_have_count(1)
    tab.page.click("#send")
    tab.ended()
    messages = stand_in.bodies[-1]["messages"]
    assert [part["type"] for part in messages[-1]["content"]] == ["image_url"]
    assert len(messages[0]["content"]) == 3  # the conversation still has its images
    files = [{"name": "broken.png", "mimeType": "image/png", "buffer": b"nothing"}]
    give_files(tab, "paste", "#prompt", files)
    expect(tab.page.locator("#said")).to_have_text(
        "broken.png is no image that this browser can read."
    )


def test_conversation_is_sent_and_edited(tab: Tab, stand_in: StandIn):
    for name in "abcdef":
        stand_in.answers[name] = [said(name.upper(), token(name.upper())), "stop"]
    for name in "ab":
        tab.ask(name)
        tab.ended()
    tab.page.get_by_role("button", name="Regenerate").click()
    tab.ended()
    tab.page.hover(".asked >> nth=1")
    tab.page.get_by_role("button", name="Edit").click()
    tab.page.keyboard.press("ControlOrMeta+a")
    tab.page.keyboard.type("c")
    tab.page.keyboard.press("Enter")
    tab.ended()
    sent_messages = [
        [(message["role"], message["content"]) for message in body["messages"]]
        for body in stand_in.bodies
    ]
    first_turn = [("user", "a"), ("assistant", "A")]
    assert sent_messages == [
        first_turn[:1],
        [*first_turn, ("user", "b")],
        [*first_turn, ("user", "b")],
        [*first_turn, ("user", "c")],
    ]
    assert tab.page.locator(".turn .text").all_inner_texts() == ["a", "A", "c", "C"]
    assert len({body["request_id"] for body in stand_in.bodies}) == 4
    tab.page.click("#new")
    assert tab.page.locator(".turn").count() == 0
    tab.ask("d")
    tab.ended()
    assert len(stand_in.bodies[-1]["messages"]) == 1


@pytest.mark.parametrize("stop_action", ["escape", "button", "new chat"])
def test_stopped_answer_keeps_its_text(tab: Tab, stand_in: StandIn, stop_action: str):
    stand_in.answers["Hello"] = [*words("one two three"), 60.0, *words("never"), "stop"]
    tab.ask("Hello")
    expect(tab.page.locator(".answer .text")).to_contain_text("one two three")
    if stop_action == "escape":
        tab.page.keyboard.press("Escape")
    else:
        tab.page.click("#send" if stop_action == "button" else "#new")
    tab.ended()
    until(lambda: stand_in.num_disconnects == 1, tab.page, "the request was not aborted")
    if stop_action == "new chat":
        assert tab.page.locator(".turn").count() == 0
    else:
        assert tab.answer() == "one two three"
        expect(tab.page.locator(".answer .stats")).to_contain_text("stopped")
        assert tab.page.locator(".failure").count() == 0
    tab.ask("again")
    tab.ended()
    assert tab.answer() == STORY


def chat_contents(tab: Tab) -> list[str]:
    """HTML of the chat and text of its context line, with and without probabilities."""
    contents = []
    for _ in range(2):
        contents += [
            tab.page.locator("#turns").inner_html(),
            tab.page.locator("#context").inner_text(),
        ]
        tab.page.click("#probabilities")
    return contents


def test_reload_restores_the_chat(tab: Tab, stand_in: StandIn, context: BrowserContext):
    call = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": "{}"},
    }
    stand_in.answers["a"] = [
        said("", token("Hm"), reasoning="Hm"), said(HOSTILE_HTML, token(HOSTILE_HTML, 0.3)),
        said("", token("<call>"), tool_calls=[call]), 0.2, said("!", token("!")), "length",
    ]  # fmt: skip
    stand_in.answers["b"] = [said("So", token("So"))] * 3 + [
        {"error": {"message": "Lost.", "type": "server_error"}}
    ]
    for text in "ab":
        tab.ask(text)
        tab.ended()
    contents_before = chat_contents(tab)
    assert "tokens/s" in contents_before[0] and "Lost." in contents_before[0]
    tab.page.reload()
    expect(tab.page.locator("#context")).to_have_text(contents_before[1])
    assert chat_contents(tab) == contents_before
    tab.page.get_by_role("button", name="Retry").click()
    tab.ended()
    expected = [("user", "a"), ("assistant", HOSTILE_HTML + "!"), ("user", "b")]
    assert [
        (message["role"], message["content"]) for message in stand_in.bodies[-1]["messages"]
    ] == expected
    other_tab = Tab(context.new_page(), tab.url)  # another tab has its own chat
    expect(other_tab.page.locator("#welcome")).to_be_visible()
    tab.page.click("#new")
    tab.page.reload()
    expect(tab.page.locator("#welcome")).to_be_visible()
    assert tab.page.evaluate("window.hacked ?? null") is None


def test_reload_keeps_a_partial_answer(tab: Tab, stand_in: StandIn):
    stand_in.answers["Hello"] = [*words("one two three"), said("", token("\ufffd")), 60.0, "stop"]
    tab.ask("Hello")
    expect(tab.page.locator(".answer .text")).to_contain_text("one two three")
    tab.page.reload()
    expect(tab.page.locator(".answer .stats")).to_contain_text("stopped")
    assert tab.answer() == "one two three"
    tab.ended()


def test_overlong_chat_is_stored_without_logprobs(tab: Tab, stand_in: StandIn):
    alternatives = {"x" * 4000 + str(i): 0.1 for i in range(4)}
    stand_in.answers["Hello"] = [*[said("ab", token("ab", 0.5, alternatives))] * 400, "stop"]
    tab.ask("Hello")
    tab.ended()
    tab.page.reload()
    assert tab.answer() == "ab" * 400
    tab.page.click("#probabilities")
    assert tab.page.locator(".token").all_text_contents() == ["ab" * 400]


def chat_titles(tab: Tab) -> list[str]:
    """Open the list of chats and return its titles."""
    tab.page.click("#all")
    expect(tab.page.locator("#history")).to_be_visible()
    return tab.page.locator("#conversations .title").all_inner_texts()


def test_stored_chats_can_be_continued(tab: Tab, stand_in: StandIn, context: BrowserContext):
    for name in ("one", "two"):
        stand_in.answers[name] = [said(f"About {name}.", token(f"About {name}.")), "stop"]
        tab.ask(name)
        tab.ended()
        tab.page.click("#new")
    assert chat_titles(tab) == ["two", "one"]
    tab.page.locator("#conversations li button").filter(has_text="one").click()
    assert tab.answer() == "About one." and tab.page.locator(".turn").count() == 2
    tab.ask("two")
    tab.ended()
    assert [message["content"] for message in stand_in.bodies[-1]["messages"]] == [
        "one",
        "About one.",
        "two",
    ]
    other_tab = Tab(context.new_page(), tab.url)  # same browser, own current chat
    expect(other_tab.page.locator("#welcome")).to_be_visible()
    assert chat_titles(other_tab) == ["one", "two"]  # newest first
    other_tab.page.locator("#conversations li button").filter(has_text="two").click()
    assert other_tab.answer() == "About two."
    other_tab.check(False)


def test_chat_deletion_can_be_undone(tab: Tab, stand_in: StandIn):
    for name in ("one", "two"):
        tab.ask(name)
        tab.ended()
        if name == "one":
            tab.page.click("#new")
    assert chat_titles(tab) == ["two", "one"]
    page = tab.page
    titles = page.locator("#conversations .title")
    page.get_by_role("button", name="Delete one").click()
    expect(titles).to_have_text(["two"])
    expect(page.locator("#undo-text")).to_have_text("Deleted “one”.")
    page.click("#undo")
    expect(titles).to_have_text(["two", "one"])
    page.get_by_role("button", name="Delete two").click()  # the current chat
    expect(titles).to_have_text(["one"])
    assert page.locator(".turn").count() == 0
    page.click("#undo")
    expect(titles).to_have_text(["two", "one"])
    assert page.locator(".turn").count() == 2
    page.get_by_role("button", name="Delete one").click()
    page.reload()
    assert chat_titles(tab) == ["two"]


@pytest.mark.parametrize(
    "turns", ["3", "[1]", '[{"answer": {}}]', '[{"answer": {"pieces": 1}}, {"text": "a"}]', None]
)
def test_incompatible_stored_chat_is_discarded(tab: Tab, turns: str | None):
    stored_chat = "{" if turns is None else f'{{"title": "a", "at": 1, "turns": {turns}}}'
    script = """kept => addEventListener('pagehide', () => { sessionStorage.setItem('quire.current', '{"id": "x"}');
        localStorage.setItem('quire.chat.x', kept) })"""
    tab.page.evaluate(script, stored_chat)
    tab.page.reload()
    expect(tab.state).to_have_attribute("data-state", "ready")
    tab.ask("Hello")
    tab.ended()
    assert tab.answer() == STORY


def test_token_rate_needs_a_measurable_time(module_page: Page):
    """Tokens that arrive in a single read do not show as twenty thousand per second."""
    script = """async times => { const { Answer } = await import("/page/answer.js");
        const [answer, clock] = [new Answer(), performance.now];
        for (const at of times) {
            performance.now = () => at;
            answer.take({choices: [{delta: {content: "a"}, logprobs: null}]});
        }
        performance.now = clock;
        return answer.stats.filter(([, name]) => name === "tokens/s").map(([figure]) => figure) }"""
    assert module_page.evaluate(script, [100, 100.1, 100.1]) == []
    assert module_page.evaluate(script, [100, 150, 150, 300]) == ["15"]
    assert module_page.evaluate(script, [100, 1e5, 1e8]) == []  # not 0.00002 tokens per second


def test_rate_formatting(tab: Tab, stand_in: StandIn):
    for rate, text in (
        (0.00958, "0"),
        (0.31, "0.3"),
        (26.17, "26.2"),
        (812.5, "813"),
        (20_500, "20,500"),
    ):
        stand_in.frame = live_frame([0], rates={"generation": rate, "prompt": rate})
        expect(tab.page.locator("#generation")).to_have_text(text)
        expect(tab.page.locator("#prompt-rate")).to_have_text(text)


def test_settings_are_sent_and_stored(tab: Tab, stand_in: StandIn):
    page = tab.page
    page.click("#settings")
    settings_by_label = {
        "Temperature": "0.7",
        "Top p": "0.9",
        "Top k": "40",
        "Min p": "0.05",
        "Repetition penalty": "1.1",
        "Max tokens": "64",
        "Seed": "-7",
        "System prompt": "Be brief.",
        "Stop strings": "A\n\\n\\n\n",
    }
    for label, value in settings_by_label.items():
        page.get_by_label(label, exact=True).fill(value)
    page.keyboard.press("Escape")
    expect(page.locator("#settings-text")).to_have_text("temperature 0.7, 64 tokens, 7 more")
    page.reload()
    tab.ask("Hello")
    tab.ended()
    body = stand_in.bodies[-1]
    expected = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
        "seed": -7,
        "stop": ["A", "\n\n"],
    }
    assert {name: body.get(name) for name in expected} == expected
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click("#settings")
    page.click("#defaults")
    page.locator("#set-top_p ~ input[type=range]").fill("0.5")
    page.keyboard.press("Escape")
    tab.ask("Hello")
    tab.ended()
    body = stand_in.bodies[-1]
    assert body["top_p"] == 0.5 and not set(expected) - {"top_p"} & set(body)
    assert body["messages"][0]["role"] == "user"


def test_settings_show_server_defaults(tab: Tab, stand_in: StandIn):
    def displayed_values(name: str) -> tuple[str | None, str]:
        box = tab.page.locator(f"#set-{name}")
        return box.get_attribute("placeholder"), tab.page.locator(
            f"#set-{name} ~ input[type=range]"
        ).input_value()

    expect(tab.state).to_have_attribute("data-state", "ready")
    tab.page.click("#settings")
    assert [displayed_values(name) for name in ("temperature", "top_k", "max_tokens")] == [
        ("1", "1"), ("0", "0"), ("default", "1024")
    ]  # fmt: skip
    stand_in.frame = live_frame(
        [0] * 60, defaults={"temperature": 0.7, "top_k": 20, "max_tokens": 512}
    )
    expect(tab.page.locator("#set-temperature")).to_have_attribute("placeholder", "0.7")
    assert [displayed_values(name) for name in ("temperature", "top_k", "max_tokens")] == [
        ("0.7", "0.7"), ("20", "20"), ("512", "512")
    ]  # fmt: skip
    tab.page.keyboard.press("Escape")
    tab.ask("Hello")
    tab.ended()
    expected = {"temperature": 0.7, "top_k": 20, "max_tokens": 512}  # the values shown are sent
    assert {name: stand_in.bodies[-1].get(name) for name in expected} == expected
    assert tab.page.locator("#settings-text").inner_text() == "Settings"  # no setting was changed


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("/srv/models/Tiny-Q4_K_M.gguf", "Tiny-Q4_K_M.gguf"), ("./Tiny.gguf", "Tiny.gguf"),
        ("models/a/b.gguf", "b.gguf"),
        ("C:\\models\\Tiny.gguf", "Tiny.gguf"), ("/srv/models/folder/", "folder"), ("owner/name", "owner/name"),
    ],
)  # fmt: skip
def test_model_label_is_its_file_name(
    context: BrowserContext, url: str, stand_in: StandIn, name: str, label: str
):
    stand_in.models = [name]
    tab = Tab(context.new_page(), url)
    expect(tab.page.locator("#greeting")).to_have_text(f"Ask {label}")
    assert (
        tab.page.locator("#model option").inner_text() == label
        and tab.page.title() == f"{label} on Quire"
    )
    starters = tab.page.locator("#starters button").all_inner_texts()
    # only quill has sort prompts
    assert len(starters) == 3 and not any("Sort: 52" in starter for starter in starters)
    tab.ask("Hello")
    tab.ended()
    assert stand_in.bodies[-1]["model"] == name


def test_model_selection(context: BrowserContext, url: str, stand_in: StandIn):
    stand_in.models = ["quill", "quill-draft"]
    tab = Tab(context.new_page(), url)
    expect(tab.page.locator("#model option")).to_have_count(2)
    # prompts for the bundled model
    expect(tab.page.locator("#taught")).to_contain_text("It knows nothing else")
    tab.page.select_option("#model", "quill-draft")
    expect(tab.page.locator("#taught")).to_be_hidden()
    tab.ask("Hello")
    tab.ended()
    assert stand_in.bodies[-1]["model"] == "quill-draft"
    until(
        lambda: stand_in.watched[-1] == "quill-draft",
        tab.page,
        "the page does not follow its engine",
    )
    expect(tab.page).to_have_title("quill-draft on Quire")
    tab.check(False)


def test_reasoning_is_collapsed_and_tool_calls_are_code(tab: Tab, stand_in: StandIn):
    call = {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    stand_in.answers["Hello"] = [
        said("", token("Let me"), reasoning="Let me", reasoning_content="Let me"),
        said("", token(" see."), reasoning=" see."),
        said("", token("</think>")),
        *words("I look it up."),
        said("", token("<call>"), tool_calls=[call]),
        said(
            "", token("{"), tool_calls=[{"index": 0, "function": {"arguments": '{"city": "Oslo",'}}]
        ),
        said("", token("}"), tool_calls=[{"index": 0, "function": {"arguments": ' "days": 2}'}}]),
        "tool_calls",
    ]
    tab.ask("Hello")
    tab.ended()
    page = tab.page
    assert tab.answer() == "I look it up."
    reasoning = page.locator(".reasoning div")
    expect(page.locator(".reasoning summary")).to_contain_text("Thought for")
    expect(reasoning).to_be_hidden()
    page.click(".reasoning summary")
    expect(reasoning).to_have_text("Let me see.")
    assert page.locator(".call header b").inner_text() == "weather"
    assert json.loads(page.locator(".call code").inner_text()) == {"city": "Oslo", "days": 2}
    page.click("#probabilities")
    assert "".join(page.locator(".token").all_text_contents()) == "I look it up."


# Tokens


def test_token_probabilities_are_shown(tab: Tab, stand_in: StandIn):
    stand_in.answers["Hello"] = [
        said("Once upon", token("Once", 0.75, {"There": 0.2}), token(" upon", 0.999)),
        said(
            " a",
            token(" a", 0.01, {" the": 0.6, " one": 0.2, " my": 0.1, " no": 0.05, " an": 0.02}),
        ),
        "stop",
    ]
    tab.ask("Hello")
    tab.ended()
    page = tab.page
    assert page.locator(".token").count() == 0
    page.click("#probabilities")
    assert page.locator(".token").all_text_contents() == ["Once", " upon", " a"]
    tints = page.locator(".token").evaluate_all(
        "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
    )
    opacity = [float(re.search(r"/ ([\d.e-]+)\)|$", tint)[1] or 1) for tint in tints]
    assert opacity[1] < opacity[0] < opacity[2] <= 0.5
    card = page.locator("#card")
    page.hover(".token >> nth=0")
    expect(card).to_be_visible()
    assert card.locator(".chosen").inner_text().split() == ["Once", "75.0", "%"]
    assert card.locator("li").all_inner_texts() == [
        "Once\n75.0 %",
        "There\n20.0 %",
        "all others\n5.0 %",
    ]
    widths = card.locator(".level").evaluate_all("levels => levels.map(level => level.style.width)")
    assert widths == ["75%", "20%"]
    page.hover(".token >> nth=2")
    # not among the five likeliest: listed last
    expect(card.locator(".chosen code")).to_have_text("\u00b7a")
    assert (
        card.locator("li").count() == 7
        and card.locator("li").nth(5).get_attribute("class") == "drawn"
    )
    box = card.bounding_box()
    assert box and box["x"] >= 0 and box["y"] >= 0
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()
    page.click("#probabilities")
    assert tab.answer() == "Once upon a"


def test_newline_tokens_show_a_mark(tab: Tab, stand_in: StandIn):
    """The mark is inside the token that ends the line, and the text is unchanged."""
    texts = ["One", ".\n\n", "- ", "two", "\n", "\nthree"]
    stand_in.answers["Hello"] = [said(text, token(text)) for text in texts] + ["stop"]
    tab.page.click("#probabilities")
    tab.ask("Hello")
    tab.ended()
    assert tab.page.locator(".token").all_text_contents() == texts
    script = """tokens => tokens.map((token) => [...token.childNodes].map(
        (node) => node.className ? getComputedStyle(node, "::before").content : node.textContent).join("|"))"""
    rendered = tab.page.locator(".token").evaluate_all(script)
    mark = '"↵"'
    assert rendered == [
        "One",
        f".|{mark}|\n|{mark}|\n",
        "- ",
        "two",
        f"{mark}|\n",
        f"{mark}|\n|three",
    ]


def test_multi_token_characters_are_not_broken(tab: Tab, stand_in: StandIn):
    stand_in.answers["Hello"] = [
        said("caf", token("caf")),
        said("", token("\ufffd", 0.5)),
        said("\u00e9 ", token("\ufffd", 0.9), token(" ")),
        said("", token("\ufffd"), token("\ufffd")),
        said("", token("\ufffd")),
        said("\U0001f426 ok", token("\ufffd", 0.25), token(" ok")),
        said("", token("\ufffd")),
        said("\u00fc\u4e16", *[token("\ufffd")] * 4),
        said(".", token(".")),
        "stop",
    ]
    tab.page.click("#probabilities")
    tab.ask("Hello")
    tab.ended()
    text = "caf\u00e9 \U0001f426 ok\u00fc\u4e16."
    assert "".join(tab.page.locator(".token").all_text_contents()) == text
    tab.page.locator(".token", has_text="\u00e9").hover()
    card = tab.page.locator("#card")
    expect(card).to_contain_text("2 tokens wrote this together")
    assert card.locator(".chosen").inner_text().split() == ["\u00e9", "45.0", "%"]
    assert card.locator("li code").all_inner_texts() == ["part of a character"] * 2
    for token_element in tab.page.locator(".token").all():
        token_element.hover()
        assert "\ufffd" not in tab.page.inner_text("body")
    tab.page.click("#probabilities")
    assert tab.answer() == text


ALIGN_SCRIPT = """chunks => { const aligner = new lib.Aligner();
    for (const [text, tokens] of chunks) aligner.push(text, tokens);
    aligner.end();
    return aligner.pieces.map(({text, tokens}) => [text, tokens.map(({token}) => token)]) }"""


@pytest.mark.parametrize(
    "chunks, pieces",
    [
        # the end of the text was held back
        ([("a", ["</think>", "aa"]), ("aa", ["a"])], [["aa", ["aa"]], ["a", ["a"]]]),
        (
            [("one", ["one", " st"]), ("", ["op"])],
            [["one", ["one"]]],
        ),  # a stop string removed the rest
        ([("on", ["one"])], [["on", ["one"]]]),
        # the template strips the space
        ([("Hello,", [" Hello", ","])], [["Hello", [" Hello"]], [",", [","]]]),
        (
            [("\u00e9", ["\ufffd", "\ufffd", "ab"]), ("ab", [])],
            [["\u00e9", ["\ufffd"] * 2], ["ab", ["ab"]]],
        ),
        ([("ok", ["<call>", "{}", "ok"])], [["ok", ["ok"]]]),
    ],
)
def test_tokens_with_late_or_no_text_are_aligned(
    module_page: Page, chunks: list[tuple[str, list[str]]], pieces: list[Any]
):
    token_chunks = [(text, [token(name) for name in names]) for text, names in chunks]
    assert module_page.evaluate(ALIGN_SCRIPT, token_chunks) == pieces


@settings(max_examples=cases(150))
@given(st.data())
def test_aligned_tokens_cover_the_whole_text(module_page: Page, data: st.DataObject):
    letters = data.draw(st.sampled_from(["ab \n", "ab \n\u00e9\u4e16\U0001f426\u0301"]))
    text = data.draw(st.text(st.sampled_from(letters), max_size=24))
    raw = text.encode()
    cuts = data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=12))
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    is_split_at_characters = True
    # characters cut off by a stop string
    end_early = data.draw(st.booleans()) and data.draw(st.integers(0, 3))
    chunks = []
    num_characters_sent = 0
    for begin, end in zip(edges, edges[1:], strict=False):
        token_text = raw[begin:end].decode(errors="replace")
        is_split_at_characters = is_split_at_characters and "\ufffd" not in token_text
        # Text is sent once its characters are complete; some may be held back, as before a
        # possible stop string.
        num_complete = len(raw[:end].decode(errors="ignore"))
        num_held_back = data.draw(st.integers(0, 2)) if data.draw(st.booleans()) else 0
        num_sent = (
            max(num_characters_sent, num_complete - num_held_back) if end < len(raw) else len(text)
        )
        tokens = [token(token_text)] if token_text else []
        if data.draw(st.booleans()):
            tokens.insert(0, token("<silent>"))  # a token without text
        num_sent = max(num_characters_sent, min(num_sent, len(text) - end_early))
        chunks.append((text[num_characters_sent:num_sent], tokens))
        num_characters_sent = num_sent
    text = text[:num_characters_sent]
    pieces = module_page.evaluate(ALIGN_SCRIPT, chunks)
    assert "".join(piece for piece, _ in pieces) == text
    assert all(piece for piece, _ in pieces)
    aligned_tokens = [name for _, names in pieces for name in names if name != "<silent>"]
    expected_tokens = [
        entry["token"] for _, tokens in chunks for entry in tokens if entry["token"] != "<silent>"
    ]
    if is_split_at_characters and not end_early:  # every token gets exactly its own text
        assert aligned_tokens == expected_tokens
        assert [piece for piece, names in pieces if "<silent>" not in names] == [
            names[0] for _, names in pieces if "<silent>" not in names
        ]


# Markdown


def test_markdown_becomes_html_elements(tab: Tab, stand_in: StandIn):
    text = (
        "A **bold** and `code **raw**` line\n\n- one\n- two\n  1. deep\n\n3. three\n\n## Head\n\n"
        "```python\nif a < b:\n    **no**\n```\n2 * 3 * 4 and *so*\n"
    )
    stand_in.answers["Hello"] = [*words(text), "stop"]
    tab.ask("Hello")
    tab.ended()
    answer = tab.page.locator(".answer .text")
    assert answer.locator("strong").all_inner_texts() == ["bold"]
    assert answer.locator("p code").all_inner_texts() == ["code **raw**"]
    assert (
        answer.locator("ul > li").count() == 2 and answer.locator("ul ol li").inner_text() == "deep"
    )
    assert answer.locator("h3").inner_text() == "Head"
    assert answer.locator("pre code").inner_text() == "if a < b:\n    **no**"
    assert answer.locator(".code header span").inner_text() == "python"
    assert (
        answer.locator("p").last.inner_text() == "2 * 3 * 4 and so"
        and answer.locator("em").inner_text() == "so"
    )


RICH_MARKDOWN = """# Title

> quoted *words*
>
> - in a list

1. first

   ```python
   def add(a, b):
       return a + b  # the sum
   ```

2. second
   - nested with **bold _both_** and ~~gone~~
     1. deep

| left | right |
|:-----|------:|
| `a`  | 1     |
| b    | <b>2  |

See [the site](https://site.example/a?b=1&c "a title") or https://other.example/x, [not this](javascript:alert(1)),
[nor this](/api/delete), ![a picture](https://site.example/p.png) and README.md.

---

```
<script>window.hacked = 1</script>
```

```unknown-language
plain
```
"""


def test_every_markdown_construct(tab: Tab, stand_in: StandIn):
    stand_in.answers["Hello"] = [
        said(text) for text in re.findall(r"(?s).{1,7}", RICH_MARKDOWN)
    ] + ["stop"]
    tab.ask("Hello")
    tab.ended()
    answer = tab.page.locator(".answer .text")
    assert answer.locator("h3").inner_text() == "Title"
    assert (
        answer.locator("blockquote em").inner_text() == "words"
        and answer.locator("blockquote li").count() == 1
    )
    assert (
        answer.locator("> ol > li").count() == 2
        and answer.locator("ol li ul li ol li").inner_text() == "deep"
    )
    code = answer.locator("ol > li > .code")
    assert code.locator("code").inner_text() == "def add(a, b):\n    return a + b  # the sum"
    assert code.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert code.locator("header span").first.inner_text() == "python"
    assert (
        answer.locator("li strong em").inner_text() == "both"
        and answer.locator("s").inner_text() == "gone"
    )
    assert answer.locator("th").all_inner_texts() == ["left", "right"]
    assert answer.locator("td").all_inner_texts() == ["a", "1", "b", "<b>2"]
    aligned = answer.locator("td").evaluate_all(
        "cells => cells.map((cell) => getComputedStyle(cell).textAlign)"
    )
    assert aligned == ["left", "right"] * 2
    links = answer.locator("a").evaluate_all(
        "links => links.map((a) => [a.textContent, a.href, a.target, a.rel])"
    )
    safe = ["_blank", "noopener noreferrer nofollow"]
    assert links == [
        ["the site", "https://site.example/a?b=1&c", *safe],
        ["https://other.example/x", "https://other.example/x", *safe],
        ["a picture", "https://site.example/p.png", *safe],
    ]  # fmt: skip
    assert (
        "!a picture" not in tab.answer()
        and "[not this](javascript:alert(1))" in tab.answer()
        and "[nor this](/api/delete)" in tab.answer()
    )
    assert answer.locator("hr").count() == 1 and answer.locator("img, script").count() == 0
    assert answer.locator("> .code code").all_inner_texts() == [
        "<script>window.hacked = 1</script>",
        "plain",
    ]
    assert tab.page.evaluate("window.hacked ?? null") is None


def test_sanitizer_removes_active_html(module_page: Page):
    """The sanitizer alone, as if the Markdown parser had let HTML through."""
    html = "<p onclick=x>a<img src=x onerror=y><svg><script>z</script></svg></p>"
    script = """html => DOMPurify.sanitize(html, {ALLOWED_TAGS: ["p"], ALLOWED_ATTR: ["class"]})"""
    assert module_page.evaluate(script, html) == "<p>a</p>"


def test_vendored_libraries_have_pinned_digests():
    digests = {
        "highlight.min.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
        "markdown-it.min.js": "40ee4f75f35a4c8d24f1d7a902f4c56a26da8bd9eec5bb02ad4a672d6ba05525",
        "purify.min.js": "1bb69dcd35ac61a515cd876d9f9024b3117c8b7a1725f9b3097782d8d822e8d3",
    }
    folder = PAGE / "vendor"
    assert {
        file.name: sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.js")
    } == digests
    assert {file.name for file in folder.glob("LICENSE*")} == {
        "LICENSE-markdown-it.txt",
        "LICENSE-dompurify.txt",
        "LICENSE-highlight.js.txt",
    }


MARKDOWN_FRAGMENTS = [
    "*",
    "**",
    "`",
    "```",
    "\n",
    "\n\n",
    "- ",
    "  ",
    "1. ",
    "# ",
    "a",
    "<b>",
    "&amp;",
    "~~~",
]


@settings(max_examples=cases(60))
@given(st.lists(st.sampled_from(MARKDOWN_FRAGMENTS), max_size=30))
def test_incremental_markdown_equals_complete_rendering(module_page: Page, fragments: list[str]):
    script = """parts => { const shown = (steps) => { const root = document.createElement("div");
            const markdown = new lib.Markdown(root); for (const step of steps) markdown.update(step); return root; };
        const grown = parts.map((_, i) => parts.slice(0, i + 1).join(""));
        const [whole, slow] = [shown([parts.join("")]), shown(grown)];
        const names = [...whole.querySelectorAll("*")].map((element) => element.localName);
        return [whole.innerHTML, slow.innerHTML, whole.textContent, names] }"""
    html_at_once, html_incremental, text, names = module_page.evaluate(script, fragments)
    assert html_at_once == html_incremental
    assert set(names) <= set(
        "p strong em code s ul ol li h3 hr br div header span button svg use pre".split()
    )
    letters = [letter for letter in "".join(fragments).replace("&amp;", "&") if letter in "ab&<>"]
    info = "".join(fragments).count("`") + "".join(fragments).count(
        "~"
    )  # the text after a fence is an info string
    assert info or [letter for letter in text if letter in "ab&<>"] == letters


def test_hostile_markdown_takes_linear_time(module_page: Page):
    hostile = (
        "*a **b `" * 20_000,
        "`" * 50_000 + " `" * 20_000,
        "- " * 30_000,
        "**a" * 30_000,
        "[a](" * 20_000,
        ">" * 30_000,
    )
    for text in (*hostile, "|a" * 5_000 + "\n" + "|-" * 5_000 + "\n", "```js\n" + "a(/b" * 20_000):
        milliseconds = module_page.evaluate(
            """text => { const began = performance.now();
                new lib.Markdown(document.createElement("div")).update(text); return performance.now() - began }""",
            text,
        )
        assert milliseconds < 15_000, text[:10]


def test_html_in_texts_is_escaped(context: BrowserContext, url: str, stand_in: StandIn):
    stand_in.models = [HOSTILE_HTML]
    group = {"name": HOSTILE_HTML, "pages": 3, "each": 1, "cells": [0, -1, 1]}
    stand_in.frame = live_frame(
        [],
        (running_request(1, id=HOSTILE_HTML, state=HOSTILE_HTML),),
        groups=[group, group | {"name": "b"}],
        state=HOSTILE_HTML,
    )
    call = {"index": 0, "function": {"name": HOSTILE_HTML, "arguments": HOSTILE_HTML}}
    stand_in.answers[HOSTILE_HTML] = [
        said(
            HOSTILE_HTML,
            token(HOSTILE_HTML, 0.5, {HOSTILE_HTML + "x": 0.3}),
            reasoning=HOSTILE_HTML,
        ),
        said("", tool_calls=[call]),
        said(f"\n\n- {HOSTILE_HTML}\n\n```{HOSTILE_HTML}\n{HOSTILE_HTML}\n```", token("x")),
        "stop",
    ]
    stand_in.refusals["no"] = (
        400,
        {
            "message": HOSTILE_HTML,
            "type": HOSTILE_HTML,
            "param": HOSTILE_HTML,
            "code": HOSTILE_HTML,
        },
    )
    tab = Tab(context.new_page(), url)
    page = tab.page
    expect(page.locator("#running li")).to_have_count(1)
    tab.ask(HOSTILE_HTML)
    tab.ended()
    assert "<img src=x onerror" in tab.answer()
    page.click(".reasoning summary")
    page.click("#probabilities")
    page.hover(".token >> nth=0")
    expect(page.locator("#card")).to_contain_text("onerror")
    page.hover("#running li")
    tab.ask("no")
    expect(page.locator(".failure")).to_contain_text("onerror")
    assert page.locator("img").count() == 0 and page.locator("body script").count() == 0
    assert page.evaluate("window.hacked") is None
    tab.check(True)


# Errors and keys


@pytest.mark.usefixtures("expects_http_errors")
def test_rejected_request_is_shown_and_can_be_retried(tab: Tab, stand_in: StandIn):
    refusal = {
        "message": "top_p: must be at most 1, got 7",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": None,
    }
    stand_in.refusals["Hello"] = (400, refusal)
    tab.ask("Hello")
    failure = tab.page.locator(".failure")
    expect(failure).to_contain_text("top_p: must be at most 1, got 7")
    expect(failure).to_contain_text("400, invalid_request_error, field top_p")
    tab.ended()
    del stand_in.refusals["Hello"]
    failure.get_by_role("button", name="Retry").click()
    tab.ended()
    assert tab.answer() == STORY and failure.count() == 0
    assert [len(body["messages"]) for body in stand_in.bodies] == [1, 1]


@pytest.mark.parametrize(
    "end", [{"error": {"message": "the engine has stopped", "type": "server_error"}}, None]
)
def test_interrupted_answer_keeps_its_text(tab: Tab, stand_in: StandIn, end: Any):
    stand_in.answers["Hello"] = [*words("one two three"), 0.1, end]
    tab.ask("Hello")
    error_text = (
        "the engine has stopped" if end else "The connection closed before the answer ended."
    )
    expect(tab.page.locator(".failure p").first).to_have_text(error_text)
    assert tab.answer() == "one two three"
    tab.page.get_by_role("button", name="Retry").click()
    expect(tab.page.locator(".failure p").first).to_have_text(error_text)
    assert [message["role"] for message in stand_in.bodies[-1]["messages"]] == ["user"]


@pytest.mark.usefixtures("expects_http_errors")
def test_page_reconnects_after_server_outage(tab: Tab, stand_in: StandIn):
    stand_in.down = True
    expect(tab.state).to_have_attribute("data-state", "away")
    tab.ask("Hello")
    expect(tab.page.locator(".failure p").first).to_have_text("the server is going down")
    tab.page.context.set_offline(True)
    tab.page.get_by_role("button", name="Retry").click()
    expect(tab.page.locator(".failure p").first).to_have_text("The server cannot be reached.")
    tab.page.context.set_offline(False)
    stand_in.down = False
    expect(tab.state).to_have_attribute("data-state", "ready")
    tab.page.get_by_role("button", name="Retry").click()
    tab.ended()
    assert tab.answer() == STORY


def test_api_key_is_requested_and_stays_in_the_tab(
    context: BrowserContext, url: str, stand_in: StandIn
):
    stand_in.key = "secret"
    tab = Tab(context.new_page(), url)
    page = tab.page
    lock = page.locator("#lock")
    expect(lock).to_be_visible()
    expect(tab.state).to_have_attribute("data-state", "locked")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#lock-title")).to_have_text("The server refused this key")
    page.keyboard.press("Escape")
    expect(lock).to_be_hidden()
    tab.ask("Hello")
    expect(lock).to_be_visible()
    page.click("#lock-cancel")
    expect(page.locator(".failure")).to_contain_text("a valid API key is needed")
    page.get_by_role("button", name="Retry").click()
    page.fill("#key", "secret")
    page.get_by_role("button", name="Unlock").click()
    tab.ended()
    assert tab.answer() == STORY
    expect(tab.state).to_have_attribute("data-state", "ready")
    expect(page.locator("#model option")).to_have_text(["quill"])
    page.reload()
    expect(tab.state).to_have_attribute("data-state", "ready")
    expect(lock).to_be_hidden()
    assert page.evaluate("Object.keys(sessionStorage).sort()") == ["quire.current", "quire.key"]
    assert page.evaluate("sessionStorage['quire.key']") == "secret"
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    visible_state = page.evaluate(
        "[...Object.values(localStorage), document.cookie, location.href, "
        "document.body.innerHTML].join()"
    )
    assert "secret" not in visible_state
    other_tab = Tab(context.new_page(), url)  # another tab does not have the key
    expect(other_tab.page.locator("#lock")).to_be_visible()
    tab.check(True)


# The engine


def test_cells_follow_the_live_events(tab: Tab, stand_in: StandIn):
    page = tab.page
    assert tab.pixel(10, 10) == tab.swatch("free")
    stand_in.frame = live_frame([1, -1, -2, 2, *[0] * 56], (running_request(1), running_request(2)))
    until(lambda: tab.pixel(10, 10) != tab.swatch("free"), page, "the first cell did not change")
    page.wait_for_timeout(1300)  # until no cell is animated
    colors = [tab.pixel(10 + CELL_PITCH * i, 10) for i in range(5)]
    assert colors[1:3] == [tab.swatch("cached"), tab.swatch("shared")] and colors[4] == tab.swatch(
        "free"
    )
    assert len(set(colors)) == 5
    counts = {
        state: page.inner_text(f"#count-{state}")
        for state in "yours running shared cached free".split()
    }
    assert counts == {"yours": "0", "running": "2", "shared": "1", "cached": "1", "free": "56"}
    assert (
        page.locator("#used").inner_text() == "34 %"
        and page.locator("#total-cached").inner_text() == "25 %"
    )
    assert (
        page.locator("#generation").inner_text() == "813"
        and page.locator("#prompt-rate").inner_text() == "120"
    )
    assert page.locator("#ttft td").all_inner_texts() == ["\u2013"] * 3
    assert page.locator("#itl td").all_inner_texts() == ["8.21", "9", "1,235"]
    label = page.locator("#maps canvas").get_attribute("aria-label") or ""
    assert label.startswith("Pages: 2 running, 1 shared, 1 cached, 56 free.")


def test_hover_highlights_and_describes_pages(tab: Tab, stand_in: StandIn):
    page = tab.page
    stand_in.frame = live_frame([1, 2, -1, *[0] * 57], (running_request(1), running_request(2)))
    expect(page.locator("#running li")).to_have_count(2)
    page.wait_for_timeout(1300)
    colors_before = [tab.pixel(10 + CELL_PITCH * i, 10) for i in range(3)]
    page.hover("#running li >> nth=1")
    until(
        lambda: tab.pixel(10, 10) != colors_before[0],
        page,
        "the other request's page stayed highlighted",
    )
    assert tab.pixel(10 + CELL_PITCH, 10) == colors_before[1]
    canvas = page.locator("#maps canvas")
    canvas.hover(position={"x": 10 + CELL_PITCH, "y": 10})
    expect(page.locator("#card")).to_contain_text("Page 1")
    expect(page.locator("#card")).to_contain_text("request 2: 120 tokens of prompt, 45 written")
    canvas.hover(position={"x": 10 + 2 * CELL_PITCH, "y": 10})
    expect(page.locator("#card")).to_contain_text("cached")
    page.mouse.move(5, 5)
    until(
        lambda: [tab.pixel(10 + CELL_PITCH * i, 10) for i in range(3)] == colors_before,
        page,
        "the page stayed highlighted",
    )


def test_pages_of_own_chat_are_marked(tab: Tab, stand_in: StandIn):
    page = tab.page
    stand_in.answers["Hello"] = [*words("one two"), 2.5, "stop"]
    tab.ask("Hello")
    until(lambda: stand_in.bodies, page, "no request was sent")
    name = f"chatcmpl-{stand_in.bodies[0]['request_id']}"
    stand_in.frame = live_frame([0] * 60, waiting=[{"id": name, "prompt": 120}], num_waiting=1)
    expect(page.locator("#waiting li")).to_have_text("yours, 120 tokens")
    stand_in.frame = live_frame(
        [1, 7, 7, *[0] * 57], (running_request(1), running_request(7, id=name))
    )
    expect(page.locator(".place")).to_have_text("on 2 pages of its own")
    expect(page.locator("#running .own .who")).to_have_text("yours")
    assert page.locator("#running li .who").all_inner_texts() == ["yours", "no. 1"]
    expect(page.locator("#count-yours")).to_have_text("2")
    page.wait_for_timeout(1100)
    assert (
        tab.pixel(10 + CELL_PITCH, 10)
        == tab.pixel(10 + 2 * CELL_PITCH, 10)
        == tab.swatch("yours")
        != tab.pixel(10, 10)
    )
    stand_in.frame = live_frame([0] * 60)
    tab.ended()
    expect(page.locator(".place")).to_be_hidden()
    expect(page.locator("#running li")).to_have_count(0)


def test_cell_changes_animate_unless_reduced_motion(browser: Browser, url: str, stand_in: StandIn):
    for motion in ("no-preference", "reduce"):
        stand_in.frame = live_frame([0] * 60)
        context = browser.new_context(reduced_motion=motion)
        tab = Tab(context.new_page(), url)
        expect(tab.page.locator("#maps canvas")).to_be_visible()
        until(lambda tab=tab: tab.pixel(10, 10) == tab.swatch("free"), tab.page, "no cells")
        stand_in.frame = live_frame([-2, *[0] * 59])
        seen_colors = set()

        def cell_is_shared(tab=tab, seen_colors=seen_colors) -> bool:
            seen_colors.add(tab.pixel(10, 10))
            return tab.swatch("shared") in seen_colors

        until(cell_is_shared, tab.page, "the cell did not change")
        transition_colors = seen_colors - {tab.swatch("free"), tab.swatch("shared")}
        assert bool(transition_colors) == (motion == "no-preference")
        tab.check(False)
        context.close()


def test_steps_and_layer_groups_are_drawn(tab: Tab, stand_in: StandIn):
    page = tab.page

    def busy_frame() -> dict[str, Any]:
        now = time.monotonic()
        groups = [
            {"name": name, "pages": 1000, "each": 4, "cells": [1] * 250}
            for name in ("full", "window 256")
        ]
        return live_frame(
            [],
            (running_request(1),),
            groups=groups,
            steps=[[now - 0.02, 260, 4, 5, 0.0123, 0, 0], [now, 4, 4, 4, 0.0082, 0, 0]],
        )

    blank = tab.page.evaluate("document.querySelector('#strip').toDataURL()")
    # Every event has recent steps: on a busy machine old ones would have left the strip.
    stand_in.frame = busy_frame
    page.wait_for_function(
        "blank => document.querySelector('#strip').toDataURL() != blank", arg=blank
    )
    expect(page.locator("#step-now")).to_have_text("4 sequences, 4 rows, 8.2 ms")
    assert page.locator(".map-name span:first-child").all_inner_texts() == ["full", "window 256"]
    expect(page.locator(".map-name").first).to_contain_text(
        "1,000 pages of 16 tokens, a cell is 4 pages"
    )
    expect(page.locator("#count-running")).to_have_text("2,000")
    box = page.locator("#strip").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 60)
    expect(page.locator("#card")).to_contain_text("256 prompt rows, 4 decode rows")
    page.locator("#maps canvas").first.hover(position={"x": 5, "y": 5})
    expect(page.locator("#card")).to_contain_text("Pages 0 to 3")


def test_draft_tokens_are_shown_if_the_engine_drafts(tab: Tab, stand_in: StandIn):
    """In the step figures and colours, and in the chat, green with the probabilities switch;
    without drafting nothing is shown.
    """
    page = tab.page
    drafted = page.locator(".of-drafts")
    assert not any(drafted.nth(i).is_visible() for i in range(drafted.count()))
    tab.ask("Hello")
    tab.ended()
    assert stand_in.bodies[-1]["stream_options"] == {"include_usage": True}
    assert "drafted" not in page.locator(".answer .foot").inner_text()

    def busy_frame(drafts: tuple[int, int, int]) -> dict[str, Any]:
        steps = [[time.monotonic(), 20, 4, 4, 0.0082, 16, 6]]
        return live_frame([0] * 60, (running_request(1),), drafts=drafts, steps=steps)

    stand_in.frame = busy_frame((1000, 4000, 3000))
    expect(page.locator("#drafts-share")).to_be_visible()
    stand_in.frame = busy_frame((1100, 4300, 3100))
    expect(page.locator("#drafts-each")).to_have_text("3")
    expect(page.locator("#drafts-share")).to_have_text("33 %")
    expect(page.locator("#drafts-length")).to_have_text("2")
    # every event has recent steps
    stand_in.frame = lambda: busy_frame((10, 40, 30)) | {"model": "another"}
    expect(page.locator("#drafts-share")).to_have_text("–")
    page.wait_for_timeout(300)
    box = page.locator("#strip").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 60)
    expect(page.locator("#card")).to_contain_text("0 prompt rows, 4 decode rows")
    expect(page.locator("#card")).to_contain_text("16 drafts, 6 accepted")

    tokens = [token("One"), token(" two"), token(" thr"), token("ee")]
    stand_in.answers["Draft"] = [{**said("One two three", *tokens), "drafted": [1, 3]}, "stop"]
    tab.ask("Draft")
    tab.ended()
    assert stand_in.bodies[-1]["stream_options"] == {"include_usage": True, "include_drafted": True}
    expect(page.locator(".answer .foot").last).to_contain_text("2 drafted")
    page.click("#probabilities")
    assert page.locator(".answer").last.locator(".token.drafted").all_inner_texts() == [
        " two",
        "ee",
    ]
    color = "e => getComputedStyle(e).color"
    drafted_color = page.locator(".answer .stats .drafted").last.evaluate(color)
    assert page.locator(".token.drafted").first.evaluate(color) == drafted_color
    assert page.locator(".token:not(.drafted)").first.evaluate(color) != drafted_color
    page.locator(".token.drafted").first.hover()
    expect(page.locator("#card .logprob")).to_contain_text("drafted")
    page.reload()
    assert page.locator(".token.drafted").all_inner_texts() == [" two", "ee"]
    expect(page.locator(".answer .foot").last).to_contain_text("2 drafted")


@pytest.mark.parametrize("cells", [1, 60, 700, 4096])
@pytest.mark.parametrize("width", [343, 500, 700])
def test_page_maps_fit_their_width(module_page: Page, cells: int, width: int):
    size = module_page.evaluate(
        "([cells, width]) => lib.measures([cells], width, 300)", [cells, width]
    )
    map_height = -(-cells // size["columns"]) * (size["high"] + size["gap"])
    assert size["columns"] * (size["wide"] + size["gap"]) - size["gap"] <= width
    assert map_height <= 300 or size["wide"] == 3
    assert size["wide"] >= 3 and map_height < 420
    assert size["wide"] == 20 or cells > 60


@pytest.mark.parametrize("state", ["loading", "asleep", "draining", "failed"])
def test_unready_engine_shows_only_its_state(tab: Tab, stand_in: StandIn, state: str):
    stand_in.frame = {"model": "quill", "state": state}
    expect(tab.state).to_have_text(state)
    expect(tab.page.locator("#engine")).to_have_class(re.compile("away"))
    stand_in.frame = live_frame([0] * 60)
    expect(tab.state).to_have_text("ready")
    expect(tab.page.locator("#engine")).not_to_have_class(re.compile("away"))


def test_hidden_tab_stops_live_updates(tab: Tab, stand_in: StandIn):
    hide = """hidden => { Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
        document.dispatchEvent(new Event("visibilitychange")) }"""
    tab.page.evaluate(hide, True)
    num_events_before = len(stand_in.watched)
    stand_in.frame = live_frame([0] * 60, rates={"generation": 999.0, "prompt": 0.0})
    tab.page.wait_for_timeout(600)
    assert (
        tab.page.locator("#generation").inner_text() == "813"
        and len(stand_in.watched) == num_events_before
    )
    tab.page.evaluate(hide, False)
    expect(tab.page.locator("#generation")).to_have_text("999")


# The whole page


def test_content_security_policy_allows_only_own_resources(tab: Tab, url: str):
    page = tab.page
    policy = page.request.get(url).headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    html = page.request.get(url).text()
    assert not re.search(r"\sstyle=|\son\w+=|<script>|<style|https?:(?!//www.w3.org)", html)
    broken = page.evaluate("fetch('https://site.example/').then(() => null, (error) => error.name)")
    assert broken == "TypeError"
    assert [error for error in tab.errors if "Content Security Policy" in error]
    tab.errors.clear()
    tab.strangers.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(context: BrowserContext, url: str, stand_in: StandIn, scheme: Any):
    page = context.new_page()
    page.emulate_media(color_scheme=scheme)
    tab = Tab(page, url)
    expect(tab.state).to_have_attribute("data-state", "ready")
    background_script = """() => { const context = new OffscreenCanvas(1, 1).getContext("2d");
        context.fillStyle = getComputedStyle(document.body).backgroundColor; context.fillRect(0, 0, 1, 1);
        return context.getImageData(0, 0, 1, 1).data[1] }"""
    until(
        lambda: tab.pixel(10, 10) == tab.swatch("free"),
        page,
        "the canvas has other colours than the page",
    )
    light = page.evaluate(background_script) > 128
    assert light == (scheme == "light")
    page.click("#theme")
    assert (page.evaluate(background_script) > 128) != light
    until(lambda: tab.pixel(10, 10) == tab.swatch("free"), page, "the canvas kept its colours")
    page.reload()
    assert (page.evaluate(background_script) > 128) != light
    tab.check(False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(context: BrowserContext, url: str, scheme: Any):
    page = context.new_page()
    page.emulate_media(color_scheme=scheme)
    page.goto(url)
    script = """() => { const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        const probe = document.body.appendChild(document.createElement("i"));
        const light = (name) => { probe.style.color = `var(--${name})`;
            context.fillStyle = getComputedStyle(probe).color;
            context.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
                .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b };
        const found = [];
        for (const under of ["paper", "desk", "raised", "pressed"])
            for (const over of ["ink", "ink-2", "ink-3", "yours-text", "wrong", "drafted", "focus", "edge"]) {
                const [a, b] = [light(over), light(under)].sort((x, y) => y - x);
                found.push([over, under, (a + 0.05) / (b + 0.05)]);
            }
        return found }"""
    for foreground, background, contrast in page.evaluate(script):
        assert contrast >= (3 if foreground in ("focus", "edge") else 4.5), (
            foreground,
            background,
            contrast,
        )


def test_phone_layout_has_a_tab_for_the_engine(browser: Browser, url: str, stand_in: StandIn):
    stand_in.frame = live_frame(
        [1, *[0] * 4095],
        tuple(running_request(number) for number in range(1, 30)),
        num_waiting=40,
        waiting=[{"id": f"w{i}", "prompt": 900} for i in range(12)],
    )
    stand_in.answers["Hello"] = [
        *words("x" * 400 + " `" + "y" * 300 + "`\n\n```\n" + "z" * 500 + "\n```"),
        "stop",
    ]
    stand_in.models = ["an-organisation/a-model-with-a-rather-long-name-32b-instruct", "another"]
    context = browser.new_context(
        viewport={"width": 375, "height": 700}, has_touch=True, is_mobile=True
    )
    tab = Tab(context.new_page(), url)
    page = tab.page

    def fits_the_screen() -> bool:
        elements = (
            "[document.documentElement, ...document.querySelectorAll('#log, #engine, .bar, "
            ".composer')]"
        )
        return page.evaluate(
            f"{elements}.every((e) => e.scrollWidth <= Math.max(e.clientWidth, 0)) && innerWidth "
            "=== 375"
        )

    expect(page.locator("#engine")).to_be_hidden()
    tab.ask("Hello")
    tab.ended()
    assert fits_the_screen()
    page.tap("#probabilities")
    assert fits_the_screen()
    page.locator(".token").first.tap()
    expect(page.locator("#card")).to_be_visible()
    assert fits_the_screen()
    page.tap("#settings")
    expect(page.locator("#drawer")).to_be_visible()
    assert fits_the_screen()
    page.get_by_role("button", name="Close").tap()
    page.tap("#tab-engine")
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    until(
        lambda: page.evaluate("document.querySelector('#maps canvas').clientHeight") > 100,
        page,
        "no map",
    )
    assert fits_the_screen()
    page.tap("#tab-chat")
    expect(page.locator("#prompt")).to_be_visible()
    tab.check(False)
    context.close()


def test_keyboard_reaches_every_control(tab: Tab, stand_in: StandIn):
    page = tab.page
    press = page.keyboard.press
    stand_in.frame = live_frame([1, -1, *[0] * 58], (running_request(1),))
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    press("Shift+Enter")
    page.keyboard.type("two")
    press("Enter")
    tab.ended()
    assert stand_in.bodies[-1]["messages"][-1]["content"] == "one\ntwo"
    press("Shift+Tab")
    expect(page.get_by_role("button", name="Regenerate")).to_be_focused()
    press("p")
    expect(page.locator("#probabilities")).to_have_attribute("aria-checked", "true")
    for _ in range(2):
        press("Shift+Tab")
    expect(page.locator(".tokens")).to_be_focused()
    expect(page.locator("#card .chosen code")).to_have_text("Once")
    press("ArrowRight")
    expect(page.locator("#card .chosen code")).to_have_text("\u00b7upon")
    press("Escape")
    expect(page.locator("#card")).to_be_hidden()
    press("g")
    expect(page.locator("#maps canvas")).to_be_focused()
    press("ArrowRight")
    expect(page.locator("#card")).to_contain_text("Page 0")
    press("ArrowRight")
    expect(page.locator("#card")).to_contain_text("Page 1")
    press("s")
    expect(page.locator("#drawer")).to_be_visible()
    press("Tab")
    page.keyboard.type("p?n")  # typed into the system prompt, not a shortcut
    expect(page.locator("#set-system")).to_have_value("p?n")
    press("Escape")
    press("?")
    expect(page.locator("#shortcuts")).to_be_visible()
    press("Escape")
    expect(page.locator("#shortcuts")).to_be_hidden()
    press("e")
    expect(page.get_by_label("Your message")).to_be_focused()
    press("Escape")
    expect(page.get_by_label("Your message")).to_have_count(0)
    press("/")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("/")
    expect(page.locator("#prompt")).to_have_value("/")
    reached_controls: set[str] = set()
    for _ in range(60):
        press("Tab")
        name, ring = page.evaluate(
            "(({id, localName}, element) => [id || localName, "
            "getComputedStyle(element).outlineStyle])(document.activeElement, "
            "document.activeElement)"
        )
        reached_controls.add(name)
        # the prompt's focus ring is the composer's border
        assert ring != "none" or name in ("body", "prompt"), name
    assert {
        "settings",
        "probabilities",
        "new",
        "theme",
        "help",
        "prompt",
        "send",
    } <= reached_controls


def test_every_control_has_an_accessible_name(tab: Tab):
    script = """() => [...document.querySelectorAll("button, input, select, textarea, canvas, dialog")]
        .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.hasAttribute("aria-labelledby")))
        .map((e) => e.outerHTML)"""
    assert tab.page.evaluate(script) == []


def test_copy_button_copies_the_answer(tab: Tab):
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.ask("Hello")
    tab.ended()
    tab.page.locator(".answer").get_by_role("button", name="Copy").click()
    expect(tab.page.locator(".answer").get_by_role("button", name="Copied")).to_be_visible()
    assert tab.page.evaluate("navigator.clipboard.readText()") == STORY


def test_view_follows_the_answer_unless_scrolled(tab: Tab, stand_in: StandIn):
    page = tab.page
    lines = list(words("\n\n".join(f"line {i}" for i in range(60))))
    stand_in.answers["Hello"] = [*lines, 1.0, *words("\n\nmore\n\nand more"), "stop"]
    gap = (
        "(() => { const e = document.getElementById('log'); return e.scrollHeight - "
        "e.scrollTop - e.clientHeight })()"
    )
    tab.ask("Hello")
    expect(page.locator(".answer")).to_contain_text("line 59")
    until(lambda: page.evaluate(gap) < 2, page, "the end is not visible")
    page.locator("#log").evaluate("log => (log.scrollTop = 0)")
    expect(page.locator("#latest")).to_be_visible()
    tab.ended()
    assert page.evaluate(gap) > 100
    page.click("#latest")
    assert page.evaluate(gap) < 2
    expect(page.locator("#latest")).to_be_hidden()
