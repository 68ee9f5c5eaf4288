"""A tab of Chromium for the tests of the page, and the marks of tests that need Chromium."""

import os
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Request, expect

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LOUD = re.compile("Failed to load resource")  # the browser's own message about an error status

needs_chromium = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and "QUIRE_NEEDS_BROWSER" not in os.environ,
        reason="needs chromium or google-chrome",
    ),
]


class Tab:
    """A page whose errors and requests to other hosts are recorded."""

    def __init__(self, page: Page, url: str):
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.strangers: list[str] = []
        page.on(
            "console", lambda message: message.type == "error" and self.errors.append(message.text)
        )
        page.on("pageerror", lambda error: self.errors.append(f"{error}\n{error.stack}"))
        page.on("request", self.asked)
        page.goto(url)
        self.state = page.locator("#state")

    def asked(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.strangers.append(request.url)

    def check(self, loud: bool) -> None:
        """Check that there were no errors and no requests to other hosts.

        `loud`: the server was expected to answer with error statuses.
        """
        assert [error for error in self.errors if not (loud and LOUD.search(error))] == []
        assert self.strangers == []

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def ended(self) -> None:
        """Wait for the answer to end."""
        expect(self.page.locator("#send")).to_have_attribute("aria-label", "Send")

    def answer(self) -> str:
        return self.page.locator(".answer .text").last.inner_text()

    def pixel(self, x: float, y: float, canvas: str = "#maps canvas") -> tuple[int, int, int]:
        """The colour of a canvas at a point."""
        script = """([selector, x, y]) => { const canvas = document.querySelector(selector), r = devicePixelRatio;
            return [...canvas.getContext("2d").getImageData(x * r, y * r, 1, 1).data].slice(0, 3) }"""
        red, green, blue = self.page.evaluate(script, [canvas, x, y])
        return red, green, blue

    def swatch(self, state: str) -> tuple[int, int, int]:
        """The legend's colour of a state."""
        script = """state => { const context = new OffscreenCanvas(1, 1).getContext("2d");
            context.fillStyle = getComputedStyle(document.querySelector(`.swatch.${state}`)).backgroundColor;
            context.fillRect(0, 0, 1, 1); return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3) }"""
        red, green, blue = self.page.evaluate(script, state)
        return red, green, blue


def until(condition: Callable[[], Any], page: Page, message: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, message
        page.wait_for_timeout(30)
