"""Judges behind a small endpoint of this process, which answers as the response tells it."""

import contextlib
import http.server
import json
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from reinforce_ada_jax.config import rules
from reinforce_ada_jax.rewards import judge, judge_template
from reinforce_ada_jax.rewards.loading import Made
from reinforce_ada_jax.rewards.workers import VerifierPool
from reinforce_ada_jax.training import components as components_lib
from reinforce_ada_jax.training import reward_check
from reinforce_ada_jax.types import Prompt
from tests import standins
from tests.running import ROOT, tiny

KEY = "sk-a-key-that-is-secret"
GRADER = "reinforce_ada_jax.rewards.judge:Judge"


class Handler(http.server.BaseHTTPRequestHandler):
    """Endpoint whose answer is what the request's last line asks for."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, text = self.server, body["messages"][0]["content"]
        wanted = text.strip().splitlines()[-1]
        with server.lock:
            server.requests.append((self.path, self.headers.get("Authorization"), body))
            server.running += 1
            server.most = max(server.most, server.running)
            count = sum(request[2] == body for request in server.requests)
        server.pause.wait(0.05)
        status, headers, content = 200, {}, {"choices": [{"message": {"content": f"Score: 3\nIt is good.\n{wanted}"}}]}
        if wanted == "fails twice" and count < 3:
            status, headers, content = 429 if count == 1 else 503, {"Retry-After": "0"}, {"error": "busy"}
        elif wanted == "fails twice":
            content["choices"][0]["message"]["content"] = "Score: 8"
        elif wanted.isdecimal():
            status, content = int(wanted), {"error": f"no key {KEY}"}
            headers = {"Location": "http://127.0.0.1:9/"}
        elif wanted == "no completion":
            content = {"choices": []}
        elif wanted == "the key":
            content["choices"][0]["message"]["content"] = f"You sent {KEY}."
        elif wanted == "the key at the cut":
            content = "x" * 190 + KEY
        with server.lock:
            server.running -= 1
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.lock, server.running, server.most = [], threading.Lock(), 0, 0
        server.pause = threading.Event()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def settings(server, cache=None, time_limit_s=10.0, **changes):
    section = {
        "url": f"http://127.0.0.1:{server.server_address[1]}/v1",
        "model": "a-judge",
        "template": "{{ problem }}\n{{ response }}",
        "score": r"(?im)^\W*score\W*(-?\d+(?:\.\d+)?)",
        "range": (0.0, 10.0),
        "parameters": '{"temperature": 0}',
    }
    return {"settings": section | changes, "cache": cache, "time_limit_s": time_limit_s}


def graded(server, response, **changes):
    with contextlib.closing(judge.Judge(**settings(server, **changes))) as grade:
        return grade(response, "", {"problem": "Say it."})


def test_a_request_has_the_model_the_text_and_the_key(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert graded(server, "Score: 7.5").reward == 0.75
    body = {
        "model": "a-judge",
        "messages": [{"role": "user", "content": "Say it.\nScore: 7.5"}],
        "temperature": 0,
    }
    assert server.requests == [("/v1/chat/completions", f"Bearer {KEY}", body)]


def test_a_column_of_a_problem_cannot_change_the_scale_or_the_answer(server):
    template = "{{ problem }} {{ answer }} {{ lowest }} {{ highest }} {{ level }}\n{{ response }}"
    columns = {"problem": "Say it.", "answer": "mine", "response": "mine", "lowest": 9, "highest": 0, "level": 3}
    with contextlib.closing(judge.Judge(**settings(server, template=template))) as grade:
        assert grade("Score: 5", "42", columns).reward == 0.5
    assert server.requests[0][2]["messages"][0]["content"] == "Say it. 42 0.0 10.0 3\nScore: 5"


NAMES = "A template may use response, answer, lowest, highest, and the columns of the problem: level, problem."


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ response }}\n{{ problm }}", f", line 2, uses 'problm', which there is not. {NAMES}"),
        ("{{ response }}{% if answer == 'rare' %}{{ lvl }}{% endif %}", ", line 1, uses 'lvl', which there is not."),
        ("a\nb {{ response", ", line 2, is no template: unexpected end of template, expected 'end of print stat"),
        ("{{ response }", ", line 1, is no template: unexpected '}'"),
        ("{{ response }} {% if answer %}", "The innermost block that needs to be closed is 'if'."),
        ("{{ response | upcase }}", ", line 1, is no template: No filter named 'upcase'."),
        ("{{ respons }} {{ problem }}", " does not show the response: it uses problem, respons, and needs"),
        ("Grade {{ 1 }} {response}", " does not show the response: it uses no name, and needs {{ response }}."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_fault_of_the_template_is_named_with_its_place(tmp_path, template, message, in_a_file):
    file = tmp_path / "judge.txt"
    file.write_text(template)
    setting, place = (str(file), f"judge.template ({file})") if in_a_file else (template, "judge.template")
    with pytest.raises(ValueError) as refused:
        judge_template.checked(setting, {"problem": "", "level": 3, "answer": "hidden"})
    assert str(refused.value).startswith(place)
    assert message in str(refused.value)


def test_an_empty_file_is_not_the_default_template(tmp_path):
    (tmp_path / "judge.txt").touch()
    with pytest.raises(ValueError, match="does not show the response"):
        judge_template.checked(str(tmp_path / "judge.txt"))
    assert judge_template.checked("") == ""


def test_names_that_may_be_missing_and_names_of_jinja_are_no_faults():
    template = (
        "{% for n in range(2) %}{{ n }}{% endfor %}{% if level is defined %}{{ level }}{% endif %}"
        "{{ source | default('none') }} {{ response }}"
    )
    assert judge_template.checked(template, ["problem"]) == template
    assert judge_template.checked("{{ any_column }} {{ response }}") == "{{ any_column }} {{ response }}"
    assert judge_template.checked(judge_template.TEMPLATE, ["problem"])


def test_what_may_pass_is_asked_again(server):
    assert graded(server, "fails twice").reward == 0.8
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("response", "message", "requests"),
    [
        ("401", r"refused the request with status 401: .*no key \(API key\)", 1),
        ("307", "refused the request with status 307", 1),
        ("500", r"gave no answer to 2 requests \(within reward.time_limit_s\): status 500", 2),
        ("no completion", "answered no chat completion with a text", 1),
        ("the key", r"has no score .* 'You sent \(API key\)\.'", 1),
        ("the key at the cut", "answered no chat completion with a text", 1),
        ("Score: 11", "the judge's score 11 is not in judge.range, 0 to 10", 1),
    ],
)
def test_failures_are_told_without_the_key(server, monkeypatch, response, message, requests):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    standins.constants(monkeypatch, judge, _FIRST_WAIT_S=0.4)  # the first pause ends in time, the second one does not
    monkeypatch.setattr(judge.random, "uniform", lambda low, high: high)
    with pytest.raises(judge.JudgeFailed, match=message) as error:
        graded(server, response, time_limit_s=1.5)
    assert len(server.requests) == requests
    assert KEY not in str(error.value)
    assert KEY[:6] not in str(error.value)


def test_a_key_that_no_header_can_have_is_not_shown(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")  # as `$(cat FILE)` does not, and a file of variables may
    assert graded(server, "Score: 5").reward == 0.5
    assert server.requests[0][1] == f"Bearer {KEY}"
    for key in (f"{KEY}\nX: y", f"{KEY}\xe9"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ValueError, match="OPENAI_API_KEY has a line break or a character") as error:
            graded(server, "Score: 5")
        assert KEY not in str(error.value)


def test_an_endpoint_that_is_not_there_fails_in_time(server):
    with pytest.raises(judge.JudgeFailed, match=r"gave no answer to 1 requests .*ConnectError"):
        graded(server, "x", url="http://127.0.0.1:1/v1", time_limit_s=0.5)


def test_answers_are_kept_for_all_that_decides_them(server, tmp_path):
    cache = str(tmp_path / "judge.sqlite3")
    for _ in range(2):
        assert graded(server, "Score: 2", cache=cache).reward == 0.2
    assert len(server.requests) == 1
    # The parser reads the stored answer; another model, template, text or parameter asks again.
    assert graded(server, "Score: 2", cache=cache, range=(0.0, 4.0)).reward == 0.5
    assert len(server.requests) == 1
    graded(server, "Score: 2", cache=cache, model="another")
    graded(server, "Score: 2", cache=cache, template="{{ response }}")
    graded(server, "Score: 2", cache=cache, parameters='{"temperature": 1}')
    graded(server, "Score: 3", cache=cache)
    assert len(server.requests) == 5


def test_of_two_answers_to_one_request_the_first_counts(tmp_path):
    first, second = (judge._Answers(str(tmp_path / "judge.sqlite3")) for _ in range(2))
    assert first.put("key", "one") == "one"
    assert second.put("key", "two") == "one"
    first.close()
    second.close()


KEPT = """
import sys
from reinforce_ada_jax.rewards.judge import _Answers

answers = _Answers(sys.argv[1])
for number in range(10**6):
    print(answers.put(str(number), f"answer {number}" + "." * 3000), flush=True)
"""


def test_what_was_stored_survives_a_kill(tmp_path):
    file = str(tmp_path / "judge.sqlite3")
    with subprocess.Popen([sys.executable, "-c", KEPT, file], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(20)]
        process.kill()  # in the middle of a write, most probably
        lines += [line for line in process.stdout.readlines() if line.endswith("\n")]
    with contextlib.closing(judge._Answers(file)) as answers:
        assert [f"{answers.get(str(number))}\n" for number in range(len(lines))] == lines
        assert answers.put("another", "new") == "new"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_without_its_folder_nothing_is_kept(server, tmp_path):
    assert graded(server, "Score: 2", cache=str(tmp_path / "later" / "judge.sqlite3")).reward == 0.2
    assert not (tmp_path / "later").exists()


def test_workers_share_the_answers_and_bound_the_requests(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    cache, log = tmp_path / "judge.sqlite3", tmp_path / "output.log"
    pairs = [(f"Score: {index % 10}", "", {"problem": "Say it."}) for index in range(40)]
    made = Made(GRADER, settings(server, cache=str(cache)))
    with VerifierPool(made, workers=2, time_limit_s=10.0, output=log) as pool:
        verdicts = pool.grade_all([*pairs, ("401", "", {"problem": "Say it."})])
    assert [verdict.reward for verdict in verdicts] == [index % 10 / 10 for index in range(40)] + [0.0]
    assert verdicts[-1].reason == "error"
    assert "status 401" in pool.failure
    # Two workers may ask for the same response at the same time, and later ones find it.
    assert 11 <= len(server.requests) <= 21
    assert server.most <= 2
    with sqlite3.connect(cache) as connection:
        assert connection.execute("SELECT count(*) FROM answers").fetchone() == (10,)
    connection.close()
    assert KEY not in pool.failure + log.read_text() + cache.read_bytes().decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "parser", "score"),
    [
        ("Score: 1\nScore: 2.5", r"Score: ([\d.]+)", 2.5),
        ("I say 3.\n**Score: 7**", r"(?im)^\W*score\W*(-?\d+(?:\.\d+)?)", 7.0),
        ('so {"score": 4, "why": {}} and {not json}', "json:score", 4.0),
        ('{"score": "6"}', "json:score", 6.0),
        ('{"a": 1} {"score": 2} {"b": 3}', "json:score", 2.0),
        # A part of an object is not the whole: a rubric may score parts.
        ('{"score": 8, "parts": [{"score": 2}, {"score": 3}]}', "json:score", 8.0),
        ('{"verdict": {"score": 5}}', "json:score", 5.0),
    ],
)
def test_the_last_score_counts(text, parser, score):
    assert judge.score_of(text, parser) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 8", 8.0), ("**Score:** 7.5.", 7.5), ("Score: **8**/10", 8.0), ("### Score\n\n8", 8.0),
        ("Score - 5", 5.0),
        ("Score: -3", -3.0), ("Score: \u22123", -3.0), ("Score: .5", 0.5),
        ("Score (0-10): 8", 8.0), ("Score (out of 10): 8", 8.0), ("Score: (8)\n\n10 is the best.", 8.0),
    ],
)  # fmt: skip
def test_the_default_expression_finds_a_score_as_judges_write_it(text, score):
    assert judge.score_of(text, tiny().judge.score) == score


@pytest.mark.parametrize(
    ("text", "parser"),
    [("none", r"Score: (\d+)"), ('{"score": true}', "json:score"), ('{"score": null}', "json:score"),
     ('{"score": "high"}', "json:score"), ("[1]", "json:score"), ("Score: x", r"Score: (\w)")],
)  # fmt: skip
def test_an_answer_without_a_score_is_a_failure(text, parser):
    with pytest.raises(judge.JudgeFailed, match="the judge's answer has no score"):
        judge.score_of(text, parser)


def test_the_judge_is_tried_before_device_work(server):
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    config = tiny(**COMPLETE | {"judge.url": url, "judge.template": "{{ problem }}\n{{ response }}"})
    prompts = [Prompt("p-1", "Rate.", answer, np.zeros(1, np.int32)) for answer in ("Score: 4", "404")]
    text = reward_check.check_reward(config, components_lib.verifier_pool(config), prompts[:1])
    assert text == "reward.kind=judge gives 0.4 to the reference answer 'Score: 4' of problem 'p-1'"
    with pytest.raises(ValueError, match=r"cannot grade .* status 404: .* Check judge.url"):
        reward_check.check_reward(config, components_lib.verifier_pool(config), prompts[1:])


COMPLETE = {
    "reward.kind": "judge",
    "reward.workers": 1,
    "judge.url": "http://localhost/v1",
    "judge.model": "m",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward.workers": 0}, "'judge': it is run in grading processes only"),
        ({"judge.url": "localhost:8000"}, "judge.url must be http"),
        ({"judge.url": "http://me:password@localhost/v1"}, "without a user"),
        ({"judge.model": ""}, "judge.model is empty"),
        ({"judge.score": "score"}, "must be a regular expression with one group"),
        ({"judge.score": "("}, "must be a regular expression with one group"),
        ({"judge.range": (1.0, 1.0)}, "must be two numbers, the lower one first"),
        ({"judge.parameters": "[]"}, "must be a JSON object"),
        ({"judge.parameters": '{"stream": true}'}, "must be a JSON object without model"),
        ({"reward.kind": "code", "code.processor_s": 3}, "killed before a slow program is"),
        ({"reward.kind": "code", "reward.workers": 0}, "'code': it is run in grading processes only"),
    ],
)
def test_settings_that_cannot_be_meant(changes, message):
    rules.check(tiny(**COMPLETE))
    with pytest.raises(ValueError, match=message) as error:
        rules.check(tiny(**COMPLETE | changes))
    assert "password" not in str(error.value)
