"""Calls of tools in turns: both forms, what surrounds them, what is wrong with them, and what is meant to confuse."""

import json
import time

import pytest

from fluxjax.environments.tool_calls import ToolCall, find_calls

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, null]}}\n</tool_call>'
TAGGED = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n two\nlines \n</parameter>\n"
    "</function>\n</tool_call>"
)
ADDED = ToolCall("add", {"a": 1, "b": [2, None]})


def calls(turn: str) -> list[ToolCall]:
    return list(find_calls(turn))


def test_both_forms_are_read_in_order():
    assert calls(f"First {ADD} and then\n{TAGGED}{ADD}<|im_end|>") == [
        ADDED,
        ToolCall("add", {"a": "1", "b": " two\nlines "}),
        ADDED,
    ]
    assert calls("<tool_call><function=now></function></tool_call>") == [ToolCall("now", {})]
    assert calls("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>") == [
        ToolCall("add", {"a": "1"})
    ]


def test_text_without_calls_and_calls_that_were_only_thought_of():
    assert calls("") == calls("tool_call add </tool_call>") == calls(f"<think>{ADD}</think>\n\nNothing to do.") == []
    assert calls(f"{TAGGED}</think>{ADD}") == [ADDED]


@pytest.mark.parametrize("form", ["hermes", "tagged"])
@pytest.mark.parametrize(
    "value",
    [
        "</tool_call>",
        ADD,
        "a</parameter>b",
        "<parameter=b>",
        "</function></tool_call>",
        "</think>",
        "é\U0001f600\x00",
    ],
)
def test_arguments_may_hold_what_looks_like_a_call(form, value):
    if form == "hermes":
        turn = f"<tool_call>{json.dumps({'name': 'say', 'arguments': {'text': value}}, ensure_ascii=False)}</tool_call>"
    else:
        turn = f"<tool_call><function=say><parameter=text>\n{value}\n</parameter></function></tool_call>"
    assert calls(f"</think>{turn}{ADD}") == [ToolCall("say", {"text": value}), ADDED]


LIKE, TAGS = "a call must be like {", "a call must be like <function="


@pytest.mark.parametrize(
    ("turn", "wrong"),
    [
        ("<tool_call>", "Expecting value"),
        ("<tool_call></tool_call>", "Expecting value"),
        ("<tool_call>add(1, 2)</tool_call>", "Expecting value"),
        ("<tool_call>{'name': 'add'}</tool_call>", "Expecting property name enclosed in double quotes"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "Expecting ',' delimiter"),
        ('<tool_call>{"name": "add", "arguments": {}}', "</tool_call> is missing"),
        ('<tool_call>{"name": "add", "arguments": {}} and more</tool_call>', "</tool_call> is missing"),
        ('<tool_call>{"name": "add"}</tool_call>', LIKE),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', LIKE),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', LIKE),
        ('<tool_call>["add"]</tool_call>', LIKE),
        ("<tool_call>3</tool_call>", LIKE),
        (f"<tool_call>{'[' * 100_000}", "maximum recursion depth exceeded"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>', "Exceeds the limit"),
        ("<tool_call><function=add></tool_call>", TAGS),
        ("<tool_call><function=></function></tool_call>", "Expecting value"),
        ("<tool_call><function=add>a=1</function></tool_call>", TAGS),
        ("<tool_call><function=add><parameter=a>1</function></tool_call>", TAGS),
        ("<tool_call><function=add><parameter=a>1</parameter></tool_call>", TAGS),
        ("<tool_call><function=add></function>", "</tool_call> is missing"),
    ],
)
def test_a_wrong_call_says_why_and_the_next_one_is_read(turn, wrong):
    (call,) = calls(turn)
    assert call.wrong.startswith(wrong) and (call.name, call.arguments) == ("", {})
    assert calls(f"{turn}\n{ADD}")[-1] == ADDED


@pytest.mark.medium
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        '<tool_call>{"',
        '<tool_call>{"a":',
        "<tool_call>[",
        "<tool_call><function=a>",
        "<tool_call>   ",
        "</parameter>   ",
        "<tool_call></tool_call>",
        "<tool_call><function=a><parameter=b>",
    ],
)
def test_long_turns_take_little_time(piece):
    """The environment reads the first nine calls of a turn."""
    begin, found = time.process_time(), find_calls(f"<tool_call><function=a><parameter=b>{piece * 20_000}")
    for _ in zip(range(9), found, strict=False):
        pass
    assert time.process_time() - begin < 2.0
