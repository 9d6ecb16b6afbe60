"""Web tasks of MiniWoB in Chromium, an environment, are played by a script: python examples/browser_environment.py

    pip install miniwob                         # the pages, and Selenium
    apt-get install chromium chromium-driver    # or Google Chrome with its ChromeDriver

The model sees a screenshot of the page, reads the task, and answers each turn with one command (`COMMANDS`). A run
names `examples.browser_environment:MiniWob`, as configs/qwen3_vl_8b.py:agent does. The answer of a record says the page
and its seed: {"task": "click-button", "seed": 7}. Pages whose content changes with time (`chase-circle`, `choose-date`)
suit no run that is to be resumed, because they show other screenshots when an episode is played again.
"""

import asyncio
import atexit
import base64
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import Any

from PIL import Image

from fluxjax.config import ConfigError
from fluxjax.environments import EnvironmentPool, Observation
from fluxjax.rewards import Prompt

COMMANDS = """Answer with one command a turn. Places are X Y in thousandths of the picture, from its top left corner.
click X Y
drag X Y X Y
scroll X Y up (or down)
type TEXT
press KEY (enter, tab, backspace, delete, escape, up, down, left or right)"""
INSTALL = "pip install miniwob, and apt-get install chromium chromium-driver (or Google Chrome with its ChromeDriver)"
SIZE = (160, 210)  # width and height of every MiniWoB page, in CSS pixels
KEYS = {name: f"arrow_{name}" for name in ("up", "down", "left", "right")}
KEYS |= {name: name for name in ("enter", "tab", "backspace", "delete", "escape")}
FLAGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--window-size=600,600",
]
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"  # the pages are files
_COMMAND = re.compile(r"^\s*(`?)(click|drag|scroll|type|press)[ \t]+(\S.*?)\1\s*$", re.IGNORECASE | re.MULTILINE)
_LONGEST = 200  # characters that a command types
# No page ends by itself, and nothing in it moves, so that an episode does not depend on the speed of the model. Focus
# shows by a frame, not by a caret that blinks.
_BEGIN = """
    core.EPISODE_MAX_TIME = 2147483647;
    if (window.jQuery) jQuery.fx.off = true;
    const style = document.createElement('style');
    const still = ['caret-color: transparent', 'transition: none', 'animation: none'];
    style.textContent = `* {${still.map(rule => rule + ' !important;').join(' ')}}`;
    document.head.appendChild(style);
    Math.seedrandom(arguments[0]);
    core.startEpisodeReal();
    const said = core.getUtterance();
    return typeof said == 'string' ? said : said.utterance;"""
_STATE = "return window.core ? [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL] : null"
_PLACE = """
    const leaves = [...document.querySelectorAll('#area *')].filter(e => !e.childElementCount && e.offsetWidth);
    const named = e => (e.textContent || e.value || '').trim() == arguments[0];
    const found = leaves.find(named) || leaves.find(e => e.localName == 'button');
    const box = found && found.getBoundingClientRect();
    return box ? [box.left + box.width / 2, box.top + box.height / 2] : null"""


class Browser:
    """Chromium with a profile of its own, which `close` removes. Raises `ConfigError` if something is not installed."""

    def __init__(self) -> None:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        chromedriver, pages = shutil.which("chromedriver"), importlib.util.find_spec("miniwob")
        if not (chromium and chromedriver and pages and pages.origin):
            places = {"miniwob": pages, "chromium": chromium, "chromedriver": chromedriver}
            missing = " and ".join(name for name, found in places.items() if not found)
            raise ConfigError(f"environment MiniWob needs {missing}: {INSTALL}")
        from selenium import webdriver  # pyright: ignore[reportMissingImports]
        from selenium.webdriver.chrome.service import Service  # pyright: ignore[reportMissingImports]

        self.pages = pathlib.Path(pages.origin).parent / "html" / "miniwob"
        _remove_left_profiles()
        self._profile = tempfile.mkdtemp(prefix=f"miniwob-{os.getpid()}-")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        options.unhandled_prompt_behavior = "dismiss"
        # Chromium does not start with its sandbox for root.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        for flag in (*FLAGS, NO_NETWORK, *sandbox, f"--user-data-dir={self._profile}"):
            options.add_argument(flag)
        try:
            # ChromeDriver is named, so that Selenium downloads none. Its files lie in the profile, too.
            service = Service(chromedriver, env=os.environ | {"TMPDIR": self._profile})
            self.driver = webdriver.Chrome(options, service)
        except BaseException:
            shutil.rmtree(self._profile, ignore_errors=True)
            raise

    def close(self) -> None:
        with contextlib.suppress(Exception):  # it may have died
            self.driver.quit()
        shutil.rmtree(self._profile, ignore_errors=True)


def _remove_left_profiles() -> None:
    """Removes the profiles of processes that were killed."""
    for profile in pathlib.Path(tempfile.gettempdir()).glob("miniwob-*-*"):
        try:
            os.kill(int(profile.name.split("-")[1]), 0)
        except ProcessLookupError:
            shutil.rmtree(profile, ignore_errors=True)
        except (ValueError, PermissionError):  # the profile of another user, or no profile
            pass


_browser: Browser | None = None  # of this process: the next episode uses it again, because a start takes a second


def _close_browser() -> None:
    global _browser
    if _browser is not None:
        _browser.close()
    _browser = None


def _open_browser() -> Browser:
    global _browser
    if _browser is None:
        _browser = Browser()
        atexit.register(_close_browser)
    return _browser


@dataclasses.dataclass(eq=False)
class MiniWob:
    """Plays a page of MiniWoB. The reward of the turn that ends the task is the page's own, without its discount for
    slowness, and 0 in the place of a negative one: a wrong answer is no worse than none. A command that can't be read
    is answered with the list of commands. If the browser dies, the episode fails, and the next one has a new browser.
    Raises `ConfigError` if a setting is wrong or something is not installed."""

    task: str = "click-test"  # the name of a page; a record's answer may name another
    scale: float = 2.0  # pixels of the screenshot for a CSS pixel: 320 x 420
    max_turns: int = 8  # after which the episode is done

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(prompt.answer), dict):
                self.task, seed = str(record.get("task", self.task)), int(record.get("seed", seed))
        self._turns = 0
        try:
            said = self._begin(seed)
        except ConfigError:
            raise
        except Exception:  # the browser of earlier episodes has died
            _close_browser()
            said = self._guarded(self._begin, seed)
        return Observation(f"{said}\n{COMMANDS}", [self._guarded(self._screenshot)])

    def step(self, text: str) -> Observation:
        self._turns += 1
        said, info = "", {}
        match = _COMMAND.search(text.split("</think>", 1)[-1])
        try:
            if match is None:
                raise ValueError("no command was found")
            chain = self._chain(name := match[2].lower(), match[3])
        except ValueError as error:
            said = f"Nothing was done: {error}. {COMMANDS}"
        else:
            info = {"command": name}
            self._guarded(chain.perform)
        state = self._guarded(self._driver.execute_script, _STATE)
        over, reward = state or (True, 0.0)  # without a state, the page has been left
        done = bool(over) or self._turns >= self.max_turns
        images = [] if said or done else [self._guarded(self._screenshot)]
        return Observation(said, images, reward=max(0.0, float(reward)) if over else 0.0, done=done, info=info)

    def demonstrate(self) -> str:
        """Returns a click on what the task names in quotes, or on the first button. Raises ValueError if there is
        none."""
        quoted = re.search(r'"([^"]*)"', self._guarded(self._driver.execute_script, "return core.getUtterance()"))
        place = self._guarded(self._driver.execute_script, _PLACE, quoted[1] if quoted else "")
        if place is None:
            raise ValueError(f"no click is known that solves {self.task}")
        return "click {:.0f} {:.0f}".format(*(1000 * at / size for at, size in zip(place, SIZE, strict=True)))

    @property
    def _driver(self) -> Any:
        return _open_browser().driver

    def _begin(self, seed: int) -> str:
        browser = _open_browser()
        page = browser.pages / f"{self.task}.html"
        if page.parent != browser.pages or not page.is_file():
            raise ConfigError(f"environment MiniWob: task is {self.task!r}; it must be a page in {browser.pages}")
        browser.driver.get(page.as_uri())
        self._pointer(self._actions().w3c_actions, 390, 300).perform()  # from where the last episode left it
        return browser.driver.execute_script(_BEGIN, seed)

    def _actions(self) -> Any:
        from selenium.webdriver import ActionChains  # pyright: ignore[reportMissingImports]

        return ActionChains(self._driver, duration=0)

    def _chain(self, name: str, rest: str) -> Any:
        """Returns the actions of a command. Raises ValueError for a command that can't be read."""
        chain = self._actions()
        if name == "type":
            if not rest.isprintable() or len(rest) > _LONGEST:  # other characters are keys for Selenium
                raise ValueError(f"type takes up to {_LONGEST} printable characters")
            return chain.send_keys(rest)
        if name == "press":
            if (key := KEYS.get(rest.lower())) is None:
                raise ValueError(f"there is no key {rest[:20]!r}")
            from selenium.webdriver import Keys  # pyright: ignore[reportMissingImports]

            return chain.send_keys(getattr(Keys, key.upper()))
        places, count = [int(number) for number in re.findall(r"\d+", rest)], {"drag": 4}.get(name, 2)
        if len(places) != count or max(places) > 1000:
            raise ValueError(f"{name} takes {count} numbers from 0 to 1000")
        points = [min(size - 1, size * place // 1000) for size, place in zip(SIZE * 2, places, strict=False)]
        if name == "scroll":
            down = -100 if "up" in rest.lower() else 100
            chain.w3c_actions.wheel_action.scroll(*points, 0, down, 0)
            return chain
        pointer = self._pointer(chain.w3c_actions, *points[:2]).pointer_action
        if name == "click":
            pointer.click()
        else:
            pointer.click_and_hold().move_to_location(*points[2:]).release()
        return chain

    @staticmethod
    def _pointer(actions: Any, x: int, y: int) -> Any:
        actions.pointer_action.move_to_location(x, y)
        return actions

    def _screenshot(self) -> Image.Image:
        clip = dict(zip(("x", "y", "width", "height", "scale"), (0, 0, *SIZE, self.scale), strict=True))
        shown = self._driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
        return Image.open(io.BytesIO(base64.b64decode(shown["data"]))).convert("RGB")

    @staticmethod
    def _guarded(function: Any, *values: Any) -> Any:
        try:
            return function(*values)
        except ConfigError:
            raise
        except Exception as error:  # Selenium and its connection have many kinds of errors
            _close_browser()
            first = str(getattr(error, "msg", error)).strip().partition("\n")[0]
            raise RuntimeError(f"the browser failed: {type(error).__name__}: {first}") from None


async def main(folder: str) -> None:
    pool = EnvironmentPool(folder)
    record = Prompt("p", "miniwob", "Do the task.", json.dumps({"task": "click-button", "seed": 7}))
    try:
        episode = await pool.start("browser_environment:MiniWob", record, seed=0)
        seen = episode.observation
        print(seen.text)
        for turn in ("press the button", await episode.demonstrate()):
            seen = await episode.act(turn)
            print(f"> {turn}\n{seen.text}".rstrip(), f"\nreward {seen.reward:g}, done: {seen.done}")
        await episode.end()
    finally:
        await pool.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as media:
        try:
            asyncio.run(main(media))
        except ConfigError as error:
            sys.exit(f"error: {error}")
