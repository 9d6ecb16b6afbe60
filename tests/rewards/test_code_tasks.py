"""The code in responses, and coding tasks in the answers of prompts."""

import ast
import pathlib
import time

import pytest

from fluxjax.base.errors import DataError
from fluxjax.base.types import Prompt
from fluxjax.rewards.code import find_code, read_task


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("42", "is of type int"),
        ("no", "Expecting value"),
        ("{}", "it has 0 inputs, 0 outputs and no tests"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs, 0 outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "must be texts"),
        ('{"entry_point": "f", "inputs": [1], "outputs": [1]}', "a list of its arguments"),
        ('{"tests": {"a": 1}}', "tests is of type dict"),
    ],
)
def test_an_answer_that_is_no_task_is_named(answer, message):
    with pytest.raises(DataError, match=f"prompt 7 of source code: answer is no coding task: .*{message}"):
        read_task(Prompt("7", "code", "?", answer))


@pytest.mark.parametrize(
    ("text", "entry_point", "code"),
    [
        ("x = 1", "", "x = 1"),
        ("```python\nx = 1\n```", "", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```py\nx = 2\n```", "", "x = 2\n"),
        ("```python\ndef f(): 1\n```\nUse it:\n```python\nf()\n```", "f", "def f(): 1\n"),
        ("```python\ndef ff(): 1\n```\n```python\nf()\n```", "f", "f()\n"),
        ("```python\nx = 1", "", "x = 1"),
        ("  ```Python title\n    x\n  ```", "", "  x\n"),
        ("```bash\nls\n```", "", ""),
        ("~~~python\nx = 1\n~~~\n```\n1\n```", "", "x = 1\n"),
        ("~~~\nx = 1\n```\n~~~~", "", "x = 1\n```\n"),
        ('````py3\nx = """\n```\n"""\n````', "", 'x = """\n```\n"""\n'),
        ("", "", ""),
        ("```python\n\n```", "", ""),
        ("x" * 100_001, "", ""),
    ],
)
def test_code_is_found_in_a_response(text, entry_point, code):
    assert find_code(text, entry_point) == code


def test_a_response_without_an_end_of_line_is_read_at_once():
    began = time.monotonic()
    for filler in ("- ", "a.", "for ", "x,", "1) ", "\n  ", "(", "="):
        find_code(fenced(filler * 50_000) + fenced(filler * 50_000) + filler * 50_000)
    assert find_code("```" + "a" * 200_000) == find_code("```" + " " * 200_000) == ""
    assert time.monotonic() - began < 5.0, "backtracking takes minutes"


SHOWN = "n = int(input())\nprint(n * 2)\n"
FUNCTION = "def f(x):\n    if x:\n        return 1\n"


def fenced(code: str, label: str = "", indent: str = "") -> str:
    return "".join(f"{indent}{line}\n" for line in (f"```{label}", *code.splitlines(), "```"))


@pytest.mark.parametrize(
    "sample", ["6\n", "YES\n", "1 2 3\n", "[1, 2]\n", "Case #1: 5\n", "-1.5\n", "{'a': 1}\n", "\n"]
)
@pytest.mark.parametrize("label", ["python", "Py", ""])
def test_a_sample_of_the_output_is_no_code(label, sample):
    text = f"Input:\n{fenced(sample)}\n{fenced(SHOWN, label)}\nThis prints\n\n{fenced(sample)}"
    assert find_code(text) == find_code(text + fenced(sample, "text")) == SHOWN


def test_a_label_counts_more_than_the_order_and_what_is_asked_for_more_than_a_label():
    later = fenced("print(f(3))\nx = 4")
    assert find_code(fenced(SHOWN, "python") + later) == SHOWN
    assert find_code(fenced(FUNCTION) + fenced("print(f(3))", "python"), "f") == FUNCTION
    assert find_code(fenced(FUNCTION) + later) == "print(f(3))\nx = 4\n"


@pytest.mark.parametrize(
    "text",
    [
        "1. Use this:\n\n" + fenced(FUNCTION, "python", "   "),
        "* So\n" + fenced(FUNCTION, "python", "\t"),
        "- a\n  - b\n" + fenced(FUNCTION, "", "      "),
        "10) " + fenced(FUNCTION, "python", "    ").lstrip(),
        "- " + fenced(FUNCTION, "", "  ").lstrip(),
        "1. So\n   ```python\n" + FUNCTION + "   ```",
        "1. So\n   ```python\n" + fenced(FUNCTION, "", "   ").partition("\n")[2].replace("   \n", "\n"),
    ],
)
def test_a_fence_in_a_list_gives_its_indentation_back(text):
    assert find_code(text) == find_code(text, "f") == FUNCTION


def test_the_rest_of_a_function_keeps_its_indentation():
    """A response may go on where the prompt's code ends."""
    rest = "    return x\n"
    assert find_code(fenced(rest, "python")) == find_code(fenced(rest, "", "  ")) == rest


def test_sources_of_the_inside_need_nothing_but_python():
    """They run where this project is not installed."""
    folder = pathlib.Path(__file__).parents[2] / "fluxjax" / "rewards" / "inside"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level < 2, path
