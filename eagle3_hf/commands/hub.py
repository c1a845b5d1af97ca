"""Handles an unreachable Hub: cached files are used, and anything else fails within seconds."""

import os
import socket
import sys
import threading
from collections.abc import Iterable
from urllib.parse import urlsplit

from .models import exists


_SECONDS = 5.0  # to wait for the Hub; its client retries each file for half a minute
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def stay_offline_where_unreachable(places: Iterable[str]) -> None:
    """Put the Hub's client into offline mode if one of the places is not local and the Hub does not answer.

    Args:
        places: Folders, files or Hub ids (`name:split`), as given to the command.
    """
    from huggingface_hub import constants

    absent = [place for place in places if not exists(place.partition(":")[0])]
    if not absent or constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in _PROXIES):
        return
    if _answers(constants.ENDPOINT):
        return
    print(
        f"{constants.ENDPOINT} cannot be reached: for {', '.join(absent)} only cached files are used", file=sys.stderr
    )
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for packages that are imported later, such as datasets


def _answers(endpoint: str) -> bool:
    """Whether a connection opens in time. A thread does it, since the lookup of the name has no time limit."""
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    opened = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
            opened.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return opened.is_set()
