"""Pages in headless Chromium, which the environment variable `EAGLE3_HF_CHROMIUM` names."""

import os
import re
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest


BROWSER = "EAGLE3_HF_CHROMIUM"


def in_browser(page: str, script: str, width: int, dark: bool, folder: Path) -> tuple[str | None, str]:
    """Load a page in a frame of this width, with a script behind it.

    A frame may be as narrow as a phone, and a window may not. The script tells the page around the frame what it has
    seen: `parent.document.documentElement.dataset.seen = ...`.

    Returns:
        What was seen, and what the browser logged.
    """
    browser = os.environ.get(BROWSER)
    if not browser:
        pytest.skip(f"{BROWSER} names no browser")
    around = folder / "around.html"
    frame = f'<iframe width="{width}" height="800" style="border: 0" srcdoc="{escape(page + script)}"></iframe>'
    around.write_text(f'<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">{frame}', encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    options += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    options += ["--window-size=1400,900", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom"]
    done = subprocess.run(
        [browser, *options, around.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    return (unescape(seen[1]) if seen else None), done.stderr
