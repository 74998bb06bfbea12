"""Notice from Google Cloud that it is about to take this machine away, read from its metadata server.

A spot node also gets SIGTERM, but only about 30 seconds before its end, and not in every process.
"""

import http.client
import pathlib
import threading
import urllib.request
from collections.abc import Callable

SERVER = "http://metadata.google.internal"
PRODUCT = pathlib.Path("/sys/class/dmi/id/product_name")
POLL_S, TIMEOUT_S = 5.0, 2.0
# Without the proxies of the environment, from which the metadata server of this machine can't be reached.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def on_google_cloud() -> bool:
    """Returns True on a machine of Google Cloud; only these have the metadata server."""
    return PRODUCT.exists() and "Google" in PRODUCT.read_text(errors="replace")


def noticed(server: str = SERVER) -> bool:
    """Returns True if the machine is preempted, or about to be ended for maintenance; False without an answer."""

    def value(name: str) -> str:
        request = urllib.request.Request(
            f"{server}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"}
        )
        with _DIRECTLY.open(request, timeout=TIMEOUT_S) as answer:
            return answer.read(100).decode(errors="replace").strip()

    try:
        return value("preempted") == "TRUE" or value("maintenance-event").startswith("TERMINATE")
    except (OSError, http.client.HTTPException):  # HTTPException: the answer is incomplete, or is not HTTP
        return False


def watch(
    on_notice: Callable[[], None], ended: threading.Event, *, server: str = SERVER, poll_s: float = POLL_S
) -> threading.Thread:
    """Calls `on_notice` once, from its own thread, when there is a notice; the thread ends after `ended` is set."""

    def ask() -> None:
        while not noticed(server):
            if ended.wait(poll_s):
                return
        if not ended.is_set():
            on_notice()

    thread = threading.Thread(target=ask, name="preemption", daemon=True)
    thread.start()
    return thread
