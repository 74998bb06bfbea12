"""An episode in this process: what an environment may return, and what it can't reach."""

import math

import numpy as np
import pytest

from reinforce_ada_jax.environments.episode import Episode, Invalid, messages_of, schemas_of
from tests.environments import classes
from tests.environments.classes import user

PROBLEM = {"problem": "2 + 3"}


def answering(*answers, first=None, tools=()):
    """An environment that gives these answers to the turns, and keeps the conversations that it was given."""

    class Scripted:
        seen: list = []  # noqa: RUF012 (of the one episode)

        def __init__(self):
            self.answers, self.tools = iter(answers), tools

        def reset(self, problem):
            return user(problem["problem"]) if first is None else first

        def step(self, messages):
            self.seen.append(messages)
            return next(self.answers)

    return Scripted


def begun(*answers, **how) -> Episode:
    return Episode(answering(*answers, **how), PROBLEM, (1, 2))


@pytest.mark.parametrize(
    "value",
    [
        [], (), None, "text", user("x")[0], [None], ["text"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "assistant", "content": "x"}], [{"role": "developer", "content": "x"}],
        [{"role": [], "content": "x"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [*user("x"), {"role": "user", "content": b"x"}],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_list_of_messages_is_refused(value):
    with pytest.raises(Invalid, match=r"reset\(\) returned .*: it must return a list of messages, each with role"):
        messages_of(value, "reset")
    with pytest.raises(Invalid, match=r"step\(\) returned .* or a finite number, the final reward"):
        messages_of(value, "step")


def test_of_a_message_role_and_content_are_kept():
    found = [{"role": "tool", "content": "5", "name": "add", "time": 3.0}, {"role": "system", "content": ""}]
    assert messages_of(tuple(found), "step") == [
        {"role": "tool", "content": "5"}, {"role": "system", "content": ""}
    ]  # fmt: skip


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(Invalid) as error:
        messages_of("x" * 100_000, "step")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (-2, -2.0),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
    ],
)
def test_a_number_is_the_final_reward(value, reward):
    found = begun(value).answer("x")
    assert found == reward and type(found) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(Invalid, match="the final reward must be finite"):
        begun(value).answer("x")


def test_the_conversation_is_given_whole_and_what_an_environment_does_to_it_changes_nothing():
    class Spoils:
        def reset(self, problem):
            problem["problem"] = "changed"
            self.own = user("first")
            return self.own

        def step(self, messages):
            told = [dict(message) for message in messages]
            messages[0]["content"] = self.own[0]["content"] = "changed"
            messages.clear()
            return user(str(told))

    problem = dict(PROBLEM)
    episode = Episode(Spoils, problem, ())
    assert problem == PROBLEM
    first, turn = user("first"), {"role": "assistant", "content": "x"}
    reply = user(str([*first, turn]))
    assert episode.answer("x") == reply
    assert episode.answer("x") == user(str([*first, turn, *reply, turn]))


def test_a_turn_that_calls_tools_is_answered_by_them_and_another_one_by_step():
    episode = begun(1.0, tools=(classes.add, classes.fail))
    call = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>'
    both = call % ("add", '"a": 2') + call % ("fail", "")
    assert episode.answer(both) == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "fail", "content": "error: RuntimeError: no luck"},
    ]
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "tool"]
    assert episode.answer(call % ("add", '"a": NaN')) == 1.0  # no call, for it is no JSON


def test_without_tools_a_call_is_text():
    assert begun(0.5).answer('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>') == 0.5


def test_the_generator_is_that_of_the_address_and_given_to_those_who_take_it():
    class Takes:
        def __init__(self, rng):
            self.rng = rng

        def reset(self, problem):
            return user(str(self.rng.integers(10**9)))

    drawn = [Episode(Takes, PROBLEM, address).messages for address in ((1, 2), (1, 2), (2, 1), (1, 2, 0, 7))]
    assert drawn[0] == drawn[1] == user(str(np.random.default_rng([1, 2]).integers(10**9)))
    assert drawn[0] != drawn[2] != drawn[3] != drawn[0]


def test_schemas_are_those_of_the_tools_unless_the_class_has_its_own():
    assert [schema["function"]["name"] for schema in schemas_of(classes.WithTools)] == ["add", "fail"]
    assert schemas_of(classes.OwnTools) == [*classes.OwnTools.tool_schemas] and schemas_of(classes.Moody) == []


def test_tools_may_be_methods_that_are_set_in_init():
    class Room:
        tools = (classes.add,)  # the model was shown this one

        def __init__(self, rng):
            self.tools = (self.look,)

        def look(self, place: str) -> str:
            """Looks at a place."""
            return f"nothing at {place}"

        def reset(self, problem):
            return user("Where is it?")

    ((found,),) = ([schema["function"] for schema in schemas_of(Room)],)
    assert (found["name"], list(found["parameters"]["properties"])) == ("look", ["place"])
    call = '<tool_call>{"name": "look", "arguments": {"place": "the door"}}</tool_call>'
    reply = Episode(Room, PROBLEM, (1,)).answer(call)
    assert reply == [{"role": "tool", "name": "look", "content": "nothing at the door"}]


def test_a_tool_that_is_not_in_a_tuple_is_named():
    class Forgot:
        tools = classes.add

    with pytest.raises(Invalid, match=r"tools is a function: list the functions, as in tools = \(calculate,\)"):
        schemas_of(Forgot)
