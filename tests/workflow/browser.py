"""A real browser without a window, for pages that people look at."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

DEMANDED = "LATENTMAKE_BROWSER"
"""Where this environment variable is set, a browser that is missing is a failure."""

_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--window-size=1200,1000", "--force-device-scale-factor=1", "--disable-gpu"),
)

_DRAWN = """
await Promise.all([...document.images].map((image) => image.decode().catch(() => {})));
await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
"""

_PATIENCE = 120.0  # seconds: on a machine with much else to do a page is slow, not wrong


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds of a page, whose elements may be replaced meanwhile."""
    end = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(StaleElementReferenceException):
            if condition():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


class Browser:
    """A page as somebody sees and uses it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, address: str = "") -> None:
        self.driver.get("about:blank")  # another address of the same page would not load it anew
        self.driver.get(page.resolve().as_uri() + address)

    def visit(self, address: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(address)

    @contextmanager
    def window(self, width: int, height: int) -> Iterator[None]:
        """Give the page another size, that of a phone for example, while the context lasts."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def press(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def click(self, name: str) -> None:
        self.driver.find_element(By.ID, name).click()

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    @property
    def hash(self) -> str:
        return str(self.run("return location.hash"))

    @property
    def notes(self) -> list[str]:
        return [element.text for element in self.all("figure .note")]

    @property
    def alts(self) -> list[str | None]:
        """What is told of each picture; None where there is none."""
        images = self.all("dialog figure img")
        return [
            image.get_attribute("alt") if image.is_displayed() else None  # type: ignore[misc]
            for image in images
        ]

    def screenshot(self) -> Image.Image:
        self.run(_DRAWN)
        return Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")

    def colours(self) -> list[tuple[int, int, int]]:
        """Return what the screen shows at the middle of each side's frame."""
        shot = self.screenshot()
        found = []
        for frame in self.all(".frame"):
            box = frame.rect
            place = (int(box["x"] + box["width"] / 2), int(box["y"] + box["height"] / 2))
            found.append(shot.getpixel(place))
        return found  # type: ignore[return-value]

    def complaints(self) -> list[str]:
        """Return what the browser has to say against the page, since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def started() -> Iterator[Browser]:
    """Start a browser; skip the test where there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        missing = "no chromium or no chromedriver is here: apt-get install chromium chromium-driver"
        if os.environ.get(DEMANDED):
            pytest.fail(missing)
        pytest.skip(missing)
    options = Options()
    options.binary_location = program
    for option in _OPTIONS:
        options.add_argument(option)
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(window)
    finally:
        window.quit()
