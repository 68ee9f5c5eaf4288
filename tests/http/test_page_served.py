"""The web page with a real server: a chat streams, and its cache pages show as running, then as
cached.
"""

import re

import pytest
from playwright.sync_api import expect, sync_playwright

from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.tests.support.browser import CHROMIUM, FLAGS, Tab, needs_chromium, until
from quire.tests.support.served import model_of, served

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def server():
    engine = make_engine(make_options(None, max_num_seqs=8, kv_cache_memory_bytes=4 << 20))
    with served(model_of(engine)) as state:
        state.engine = engine
        yield state


def page_counts(tab: Tab) -> dict[str, int]:
    """Page counts by state, from the legend."""
    text = tab.page.locator("#legend").inner_text()
    return {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"([a-z]+)\s+([\d,]+)", text)
    }


def test_chat_updates_page_map(server):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            tab = Tab(browser.new_page(), server.url)
            expect(tab.state).to_have_attribute("data-state", "ready")
            total = sum(group.num_pages - 1 for group in server.engine.tables[0].pools)
            until(
                lambda: page_counts(tab).get("free") == total,
                tab.page,
                "not every page is free initially",
            )
            tab.ask("Write a short story about a dog.")
            until(
                lambda: page_counts(tab)["running"] + page_counts(tab)["yours"] > 0,
                tab.page,
                "no page shows as running",
            )
            tab.ended()
            assert len(tab.answer().split()) > 30
            until(
                lambda: page_counts(tab)["running"] + page_counts(tab)["yours"] == 0,
                tab.page,
                "pages still show as running",
            )
            assert page_counts(tab)["cached"] > 0 and sum(page_counts(tab).values()) == total
            tab.check(loud=False)
        finally:
            browser.close()


def test_repeated_answer_is_drafted():
    config = {"method": "suffix", "num_speculative_tokens": 4}
    engine = make_engine(
        make_options(None, max_num_seqs=2, kv_cache_memory_bytes=4 << 20, speculative_config=config)
    )
    with served(model_of(engine)) as state, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            tab = Tab(browser.new_page(), state.url)
            expect(tab.page.locator("#drafts-share")).to_be_visible()
            tab.page.click("#probabilities")
            tab.ask("Sort: 52 31 90 17 68")
            tab.ended()
            tab.page.get_by_role("button", name="Regenerate").click()
            tab.ended()
            drafted = tab.page.locator(".answer").last.locator(".token.drafted")
            num_drafted = tab.page.locator(".answer .stats .drafted b").last.inner_text()
            assert 0 < drafted.count() <= int(num_drafted)
            expect(tab.page.locator("#drafts-share")).to_have_text(re.compile(r"\d+ %"))
            tab.check(loud=False)
        finally:
            browser.close()
