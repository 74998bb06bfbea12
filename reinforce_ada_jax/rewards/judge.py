"""Reward of a judge: a model behind an OpenAI-compatible endpoint scores the response.

Each verifier worker sends one request at a time, so `reward.workers` limits the concurrent requests. Answers are kept
in a file in the work directory, so that a resumed run and a response drawn twice get the same score. Neither this file
nor any message contains the API key.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import httpx
from jinja2 import TemplateError

from reinforce_ada_jax.rewards.dialects import Columns
from reinforce_ada_jax.rewards.judge_template import ENVIRONMENT, TEMPLATE
from reinforce_ada_jax.types import Verdict

_JSON = "json:"
_MAX_ANSWER_BYTES = 2**20
_SPARE_S = 0.5  # before the worker would be killed
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_AGAIN = (408, 409, 425, 429)  # statuses below 500 after which another request may succeed
_WAIT_FOR_LOCK_S = 30.0


class JudgeFailed(Exception):
    """Failure to get a score; the text is one line without the API key."""


class _Temporary(Exception):
    """Failure that may pass; `wait_s` are the seconds that the endpoint asks to wait, or 0."""

    def __init__(self, text: str, wait_s: float = 0.0):
        super().__init__(text)
        self.wait_s = wait_s


def score_of(text: str, parser: str) -> float:
    """Returns the number that the parser finds in a judge's answer; JudgeFailed if there is none.

    The parser is a regular expression, and the only group of its last match is the number. Or it is "json:FIELD", and
    the number is this field in the last JSON object of the text that has the field, and is in no other such object.
    """
    found: Any = None
    if parser.startswith(_JSON):
        name, decoder, end = parser.removeprefix(_JSON), json.JSONDecoder(), 0
        for brace in re.finditer(r"\{", text):
            if brace.start() < end:  # within an object that has the field
                continue
            with contextlib.suppress(ValueError, RecursionError):
                value, after = decoder.raw_decode(text, brace.start())
                if name in value:
                    found, end = value[name], after
    else:
        for match in re.finditer(parser, text):
            found = match[1]
    try:
        if isinstance(found, int | float | str) and not isinstance(found, bool):
            return float(found.replace("\N{MINUS SIGN}", "-") if isinstance(found, str) else found)
    except (ValueError, OverflowError):
        pass
    raise JudgeFailed(f"the judge's answer has no score for judge.score={parser!r}; it ends {text[-200:]!r}")


class _Answers:
    """Answers of judges, by the hash of URL and request, in a file that several processes may use at the same time."""

    def __init__(self, path: str | None):
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def _open(self) -> sqlite3.Connection | None:
        # Nothing is written while the folder does not exist: a command makes it, but not in a dry run.
        if self._connection is None and self._path is not None and os.path.isdir(os.path.dirname(self._path)):
            self._connection = sqlite3.connect(self._path, timeout=_WAIT_FOR_LOCK_S, isolation_level=None)
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        return self._connection

    def get(self, key: str) -> str | None:
        connection = self._open()
        row = connection and connection.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: str, answer: str) -> str:
        """Stores an answer unless there is one, and returns the stored one: equal responses have equal scores."""
        connection = self._open()
        if connection is None:
            return answer
        connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, answer))
        return self.get(key) or answer

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class _Endpoint:
    """Chat completions behind an address."""

    def __init__(self, url: str):
        self.url = f"{url.rstrip('/')}/chat/completions"
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # httpx would show it in its error
            raise ValueError("OPENAI_API_KEY has a line break or a character that is not ASCII: set it again.")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.Client(headers=headers, follow_redirects=False)  # a redirect could take the key elsewhere

    def close(self) -> None:
        self._client.close()

    def _without_key(self, text: str) -> str:
        for key in filter(None, (self._key, self._key.replace("/", r"\/"))):  # JSON may escape a slash
            text = text.replace(key, "(API key)")
        return text

    def _content(self, body: Mapping[str, Any], deadline: float) -> tuple[httpx.Response, bytes]:
        content = b""
        timeout = max(0.01, deadline - time.monotonic())
        with self._client.stream("POST", self.url, json=body, timeout=timeout) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > _MAX_ANSWER_BYTES:
                    raise JudgeFailed(f"{self.url} answered more than {_MAX_ANSWER_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise _Temporary("the answer did not end in time")
        return response, content

    def ask(self, body: Mapping[str, Any], deadline: float) -> str:
        """Returns the text of the answer to one request; _Temporary if another one may succeed, else JudgeFailed."""
        try:
            response, content = self._content(body, deadline)
        except httpx.HTTPError as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise _Temporary(self._without_key(text)) from None
        said = self._without_key(content.decode(errors="replace"))  # before it is cut: a part of a key is secret, too
        if response.status_code != httpx.codes.OK:
            text = " ".join(f"status {response.status_code}: {said[:300]}".split())
            if response.status_code < httpx.codes.INTERNAL_SERVER_ERROR and response.status_code not in _AGAIN:
                raise JudgeFailed(f"{self.url} refused the request with {text}")
            wait = response.headers.get("Retry-After", "")
            raise _Temporary(text, min(float(wait), _LONGEST_WAIT_S) if wait.isdecimal() else 0.0)
        try:
            answer = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, LookupError, TypeError):
            answer = None
        if not isinstance(answer, str):
            raise JudgeFailed(f"{self.url} answered no chat completion with a text: {said[:200]!r}")
        return self._without_key(answer)

    def ask_until(self, body: Mapping[str, Any], deadline: float) -> str:
        """Returns the text of the answer; a request that fails is repeated, with growing pauses.

        Raises JudgeFailed where the time is used up, or the endpoint refuses the request.
        """
        attempt = 0
        while True:
            try:
                return self.ask(body, deadline)
            except _Temporary as error:
                pause = min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
                pause, attempt = max(pause, error.wait_s), attempt + 1
                if time.monotonic() + pause > deadline:
                    raise JudgeFailed(
                        f"{self.url} gave no answer to {attempt} requests (within reward.time_limit_s): {error}"
                    ) from None
            time.sleep(pause)


class Judge:
    """Grader that asks a judge, for a verifier worker; `close` ends its connections.

    `settings` are the fields of the configuration's section `judge`; `template` is the text itself ("": `TEMPLATE`).
    The template gets the columns of the problem, and response, answer, lowest and highest, which hide columns with
    these names. `cache` is the file of the answers, `time_limit_s` the limit of one grading with all its requests.
    """

    def __init__(self, settings: Mapping[str, Any], *, cache: str | None, time_limit_s: float):
        self._template = ENVIRONMENT.from_string(settings["template"] or TEMPLATE)
        self._endpoint, self._answers = _Endpoint(settings["url"]), _Answers(cache)
        self._request = {"model": settings["model"], **json.loads(settings["parameters"])}
        self._score, self._time_limit_s = settings["score"], time_limit_s
        self._lowest, self._highest = settings["range"]

    def __call__(self, response: str, answer: str, columns: Columns) -> Verdict:
        """Returns the score as a reward in [0, 1]; JudgeFailed if there is none."""
        deadline = time.monotonic() + self._time_limit_s - _SPARE_S
        given = {"response": response, "answer": answer, "lowest": self._lowest, "highest": self._highest}
        try:
            text = self._template.render(dict(columns) | given)
        except TemplateError as error:
            raise JudgeFailed(f"judge.template can't be filled in: {error}") from error
        body = self._request | {"messages": [{"role": "user", "content": text}]}
        key = hashlib.sha256(json.dumps([self._endpoint.url, body], sort_keys=True).encode()).hexdigest()
        found = self._answers.get(key)
        if found is None:
            said = self._endpoint.ask_until(body, deadline)
            self._value(said)  # an answer without a score is not stored
            found = self._answers.put(key, said)
        value = self._value(found)
        reward = (value - self._lowest) / (self._highest - self._lowest)
        return Verdict(reward >= 1.0, reward)

    def _value(self, said: str) -> float:
        value = score_of(said, self._score)
        if not self._lowest <= value <= self._highest:
            limits = f"{self._lowest:g} to {self._highest:g}"
            raise JudgeFailed(f"the judge's score {value:g} is not in judge.range, {limits}")
        return value

    def close(self) -> None:
        self._endpoint.close()
        self._answers.close()
