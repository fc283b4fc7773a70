"""A real browser on a real `tidemill web`, for tests of its pages."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.late_imports import Late
from tests.support.preloaded import REPO

if TYPE_CHECKING:
    from playwright.async_api import Page

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000.0
"""Machines that run tests are busy."""


def chromium() -> str:
    """The system's browser; nothing is ever downloaded."""
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    if executable is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(EXECUTABLES)} is on the path")
    return executable


@contextlib.asynccontextmanager
async def serving(runs: Path, url: str, *arguments: str) -> AsyncIterator[str]:
    """A process of `tidemill web`, and the address that it prints."""
    words = ("-m", "tidemill.services.console", "web", "--port", "0", "--runs-dir", str(runs))
    command = [sys.executable, *words, *arguments]
    variables = os.environ | {"TIDEMILL_REDIS_URL": url}
    process = await asyncio.to_thread(
        subprocess.Popen, command, cwd=REPO, env=variables, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert "http://" in line, f"the server printed {line!r}"
        yield line.partition("http://")[2].strip()
    finally:
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait, 120)


@contextlib.asynccontextmanager
async def browsing(
    width: int = 1280, height: int = 900, expected: str = "", **options: Any
) -> AsyncIterator["Page"]:
    """A page that fails the test where a script fails or the page's policy is broken; errors that have the
    words `expected` in them are not counted."""
    complaints: list[str] = []
    async with Late("playwright.async_api").async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium())
        page = await browser.new_page(viewport={"width": width, "height": height}, **options)
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))

        def note(message: Any) -> None:
            if message.type == "error" and not (expected and expected in message.text):
                complaints.append(message.text)

        page.on("console", note)
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        try:
            yield page
        finally:
            await browser.close()
    assert not complaints
