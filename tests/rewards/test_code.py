"""Rewards of code: the shapes of tasks, cheats that are worth nothing, and time-outs that adapt."""

import asyncio
import json
import textwrap

import pytest
from sandboxes import bubblewrap

from fluxjax.base.errors import ConfigError, DataError
from fluxjax.base.types import Completion, Prompt
from fluxjax.rewards import find_reward
from fluxjax.rewards.code import CodeReward, TimeLimits
from fluxjax.rewards.sandbox import Outcome, SandboxLimits

LIMITS = SandboxLimits(memory=128 << 20, output=20_000)
ADD = {
    "entry_point": "add",
    "tests": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0",
}
SUM = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}


@pytest.fixture(scope="module")
def reward():
    return CodeReward(bubblewrap(), limits=LIMITS, time_limits=TimeLimits(maximum=20.0, adaptive=False))


def completion(task, text, id="1"):
    text = textwrap.dedent(text) if text.startswith("\n") else text
    return Completion(Prompt(id, "code", "?", json.dumps(task)), text)


def score(reward, task, text):
    return asyncio.run(reward.score(completion(task, text)))


ALL_KINDS = r"""
import math
for value in (None, True, -1, 1 << 200, 1.5, math.inf, 1j, "a\ud800", b"\xff", [1], (1,), {1: [2]}, {1}, range(3)):
    assert type(f(value)) is type(value) and f(value) == value
assert math.isnan(f(math.nan)) and list(f(iter([1, 2]))) == [1, 2] and f(frozenset({2})) == frozenset({2})
"""
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    @property
    def top(self): return self.items[-1]
"""
STACK_TESTS = """
from solution import Stack
def test():
    s = Stack()
    s.push(1); s.push(2)
    assert s.pop() == 2 and len(s) == 1 and s.top == 1
"""
BAG_TESTS = """
from solution import Bag, Keys
def test():
    b = Bag()
    assert len(b) == 0 and list(b) == []
    b.put(3); b.put(5)
    assert len(b) == 2 and list(b) == [3, 5] and 5 in b and 4 not in b and b['sum'] == 8
    assert len(Keys()) == 2 and Keys()['b'] == 2
"""
BAG = """
class Keys:
    def __len__(self): return 2
    def __getitem__(self, key): return {'a': 1, 'b': 2}[key]
class Bag:
    def __init__(self): self.x = []
    def put(self, x): self.x.append(x)
    def __len__(self): return len(self.x)
    def __iter__(self): yield from self.x
    def __getitem__(self, key): return {'sum': sum(self.x)}[key]
"""
PLUS = "def add(a, b): return a + b"
PRINTS = "print(eval(input().replace(' ', '+')))"
SHAPES = {  # task, a right response, a wrong one
    "check": (ADD, PLUS, "def add(a, b): return a - b"),
    "fenced": (ADD, f"So:\n```python\n{PLUS}\n```\nDone.", "```python\ndef add(a, b): return b\n```"),
    "continued": (
        ADD | {"setup": "def helper(x):\n    return x\n\ndef add(a, b):\n    '''Adds.'''\n"},
        "    return helper(a) + b\n",
        "    return helper(a)\n",
    ),
    "continued in one line": (ADD | {"setup": "def add(a, b):\n"}, "    return a + b", "    return None"),
    "setup for code that stands alone": (
        ADD | {"setup": "import math\n\ndef add(a, b):\n    '''Adds.'''\n"},
        "def add(a, b): return math.floor(a + b)",
        "def add(a, b): return math.pi",
    ),
    "tests that use helpers and the function's name": (
        {
            "entry_point": "f",
            "setup": "def twice(x): return 2 * x\ndef f(x):\n    ''",
            "tests": "def check(c): assert c(twice(3)) == f(6)[:] == [6]",
        },
        "def f(x): return [x]",
        "def f(x): return (x,)",
    ),
    "KodCode": (
        {"tests": "from solution import add\ndef test_1(): assert add(1, 1) == 2\ndef test_2(): assert add(7, 1) == 8"},
        PLUS,
        "def add(a, b): return a + b if a < 5 else a",
    ),
    "expects an exception": (
        {
            "tests": "from solution import f\ndef test():\n    try: f(0)\n    except ZeroDivisionError: return\n"
            "    assert False"
        },
        "class Mine(ZeroDivisionError): pass\ndef f(x): raise Mine",
        "def f(x): raise Exception('ZeroDivisionError')",
    ),
    "unittest": (
        {
            "tests": "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n"
            "    def test(self): self.assertEqual(f(2), {2: (1, 'x')})"
        },
        "def f(n): return {n: (1, 'x')}",
        "def f(n): return {n: [1, 'x']}",
    ),
    "a class of tests": (
        {
            "tests": "from solution import f\nclass TestF:\n    def setup_method(self): self.x = 3\n"
            "    def test(self): assert f(self.x) == 3"
        },
        "def f(n): return n",
        "def f(n): return -n",
    ),
    "assertions": ({"tests": ["assert f(1) == 1", "assert f(2) == 4"]}, "def f(x): return x * x", "def f(x): return x"),
    "a class": ({"tests": STACK_TESTS}, STACK, "class Stack(list):\n    push = list.append\n    top = 2"),
    "containers": ({"tests": BAG_TESTS}, BAG, BAG.replace("yield from self.x", "yield from self.x[:1]")),
    "pairs": (
        {"entry_point": "f", "inputs": [[1, [2]], [0, []]], "outputs": [[1, 2], []]},
        "def f(a, b): return (a, *b) if a else []",
        "def f(a, b): return [a, *b]",
    ),
    "pairs with floats": (
        {"entry_point": "f", "inputs": [[0.1, 0.2], [1, 1]], "outputs": [0.3, 2]},
        "def f(a, b): return a + b",
        "def f(a, b): return a + b + 1e-6",
    ),
    "all kinds of plain data": (
        {"tests": ALL_KINDS},
        "def f(x): return x",
        "def f(x): return list(x) if x == (1,) else x",
    ),
    "program": (SUM, "print(sum(map(int, input().split())))\nexit()", "print(3)"),
    "program with a main": (
        SUM,
        "def main():\n    import sys\n    print(sum(map(int, sys.stdin.read().split())), '\\n')\n"
        "if __name__ == '__main__': main()",
        "if __name__ != '__main__': print(3)",
    ),
    "program that fails in the end": (SUM, PRINTS, PRINTS + "; 1 / 0"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_tasks(reward, shape):
    task, right, wrong = SHAPES[shape]
    reached = score(reward, task, right)
    assert (reached.value, reached.correct, reached.reason) == (1.0, True, ""), reached
    assert reached.seconds > 0
    missed = score(reward, task, wrong)
    assert (missed.value, missed.correct) == (0.0, False) and missed.reason, missed


EVERYTHING = """
class Everything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 1
    def __contains__(self, item): return True
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    def __iter__(self): return iter([])
    def __sub__(self, other): return 0
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __rsub__ = __abs__ = __add__ = __radd__ = __sub__
"""
CHEATS = {
    "ends the process": "import os; os._exit(0)",
    "ends in the call": "def add(a, b):\n    import os; os._exit(0)",
    "leaves in the call": "def add(a, b): raise SystemExit(0)",
    "prints a verdict": """
        import json, os, sys
        for descriptor in range(64):
            for text in ('{"passed": true, "reason": "", "seconds": 0}', '{"value": true}', "PASSED", "OK"):
                try: os.write(descriptor, text.encode() + b"\\n")
                except OSError: pass
        os._exit(0)
        """,
    "prints a verdict in the call": """
        import os
        def add(a, b):
            for descriptor in range(64):
                try: os.write(descriptor, b'{"passed": true, "reason": "", "seconds": 0}\\n')
                except OSError: pass
            os._exit(0)
        """,
    "equals everything": EVERYTHING + "def add(a, b): return Everything()",
    "is everything": EVERYTHING + "add = Everything()",
    "integer that equals everything": """
        class Number(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
        def add(a, b): return Number(99)
        """,
    "patches assertions": """
        import builtins, unittest
        unittest.TestCase.assertEqual = lambda *args: None
        builtins.AssertionError = type("Quiet", (BaseException,), {})
        builtins.isinstance = builtins.all = lambda *args: True
        def add(a, b): return None
        """,
    "patches plain data": """
        import sys, json
        json.dumps = lambda *args, **kwargs: '{"value": {"object": 0}}'
        def add(a, b): return 99
        """,
    "raises what ends loops": "def add(a, b): raise StopIteration",
    "raises what tests skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('no')",
    "looks up the stack": """
        import gc, sys
        def found(values):  # put together in the call, else this code would find itself
            return any("assert candi" + chr(100) + "ate(1, 2)" in value for value in values if type(value) is str)
        def add(a, b):
            frame = sys._getframe()
            while frame:
                if found([*frame.f_locals.values(), *frame.f_globals.values()]): return 3 if a == 1 else 0
                frame = frame.f_back
            for value in gc.get_objects():
                if isinstance(value, dict) and found(list(value.values())): return 3 if a == 1 else 0
        """,
    "reads the tests": """
        import os
        wanted = "assert candi" + chr(100) + "ate(1, 2)"
        def add(a, b):
            for folder, _, names in os.walk("/box"):
                for name in names:
                    if wanted in open(os.path.join(folder, name)).read(): return 3 if a == 1 else 0
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if wanted in open(f"/proc/{pid}/cmdline").read(): return 3 if a == 1 else 0
        """,
    "an answer without end": """
        def add(a, b):
            while True: yield 1
        """,
    "an answer of itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a deep answer": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "a large answer": "def add(a, b): return 'x' * (17 << 20)",
    "a line without end": """
        import os
        def add(a, b):
            for descriptor in range(3, 64):
                try:
                    while True: os.write(descriptor, b"[" * 65536)
                except OSError: pass
        """,
    "answers in advance": """
        import os
        for descriptor in range(64):
            try: os.write(descriptor, b'{"value": true}\\n' * 100)
            except OSError: pass
        def add(a, b): return None
        """,
    "no function": "x = 1",
    "no code": "I do not know.",
    "memory": "def add(a, b): return bytearray(1 << 40)",
}


ANYTHING = EVERYTHING + "def f(x): return Everything()"
LENGTH, LOOP = "    assert len(r) == 2", "    for got in r: assert got == 1"
NO_ROWS = {"name": "parametrize", "args": ("x", [])}
NOTHING = "the tests have nothing that tests"
LIES = {  # what a test looks at, and an object that would say one thing to one part of it and another to the next
    "no items": (LENGTH, LOOP, "__iter__ = lambda self: iter(())"),
    "items for the length": (LENGTH, LOOP, "__iter__ = lambda self: iter(self.told.pop() * [7])\n    told = [0, 2]"),
    "items after the loop": (LOOP, LENGTH, "__iter__ = lambda self: iter(self.told.pop() * [7])\n    told = [2, 0]"),
    "no items by number": (LENGTH, LOOP, "__getitem__ = lambda self, n: ()[n]"),
    "another length": (
        LENGTH,
        "    for n in range(len(r)): assert r[n] == 1",
        "__getitem__ = lambda self, n: 7\n    told = [0, 2]\n    def __len__(self): return self.told.pop()",
    ),
}


CARELESS = {  # tests that a trick could slip through, and the trick
    "a loop that an exception ends": (
        "def check(candidate):\n    for got, expected in zip(map(candidate, [1, 2]), [1, 2]): assert got == expected",
        "def f(x): raise StopIteration",
    ),
    "names of Python": (
        "def check(candidate):\n    assert abs(candidate(1) - 1) < 1e-6",
        "abs = lambda x: 0\ndef f(x): return 5",
    ),
    "names of an import": (
        "from solution import *\nimport math\ndef check(candidate):\n    assert math.fabs(f(1) - 1) < 1e-6",
        "class math: fabs = lambda x: 0\ndef f(x): return 5",
    ),
    "an import before the star": (
        "import math\nfrom solution import *\ndef check(candidate):\n    assert math.fabs(f(1) - 1) < 1e-6",
        "class math: fabs = lambda x: 0\ndef f(x): return 5",
    ),
    "whatever is raised": (
        "def check(candidate):\n    try: assert candidate(1) == 1\n    except Exception: pass",
        "def f(x):\n    import os; os._exit(0)",
    ),
    "an item of the answer": ("def check(candidate): assert 7 in candidate(1)", ANYTHING),
    "what cannot be sent is no error of the code": (
        "def check(candidate):\n    try: candidate(object())\n    except ValueError: pass",
        "def f(x): return 1",
    ),
    "an answer that is true": ("def check(candidate): assert candidate(1)", ANYTHING),
    "an answer that is not false": ("def check(candidate): assert not candidate(1)", "def f(x): return object()"),
    "the argument is sorted, too": (
        "def check(candidate):\n    x = [2, 1]\n    assert candidate(x) == sorted(x)",
        "def f(x):\n    x.clear()\n    return []",
    ),
}


LIAR = "class Liar:\n    __len__ = lambda self: 2\n    {}\ndef f(x): return Liar()"
LOOKS = "def check(candidate):\n    r = candidate(1)\n{}\n{}"
WORTHLESS = {cheat: (ADD, text, "") for cheat, text in CHEATS.items()}
for name, (first, second, says) in LIES.items():
    task = {"entry_point": "f", "tests": LOOKS.format(first, second)}
    WORTHLESS[name] = task, LIAR.format(says), "of the tests: "
for name, (tests, trick) in CARELESS.items():
    WORTHLESS[name] = {"entry_point": "f", "tests": tests}, trick, ""


@pytest.mark.parametrize("case", WORTHLESS)
def test_cheats_lies_and_tricks_are_worth_nothing(reward, case):
    task, text, reason = WORTHLESS[case]
    result = score(reward, task, text)
    assert (result.value, result.correct) == (0.0, False) and result.reason and reason in result.reason, result


@pytest.mark.parametrize(
    ("tests", "message"),
    [("import no_such_module\ndef test(): pass", "import no_such_module, which"), ("def test(:", "are no Python")],
)
def test_a_task_that_no_code_could_pass_here_is_a_failure_of_the_reward(reward, tests, message):
    with pytest.raises(DataError, match=message):
        score(reward, {"tests": tests}, "x = 1")


@pytest.mark.parametrize(
    ("task", "text", "reason"),
    [
        (ADD, "def add(a, b): return a", "line 2 of the tests: AssertionError"),
        (ADD, "def add(a, b): return c", "NameError: name 'c' is not defined"),
        (ADD, "def add(a, b: return", "SyntaxError"),
        (ADD, "import os; os.kill(os.getpid(), 9)", "the code ended its process (exit status 137"),
        (ADD, "import sys; sys.exit(0)", "SystemExit"),
        (SUM, "print(3)", "input 1: another output than expected"),
        (SUM, "1 / 0", "input 0: exit status 1 ZeroDivisionError"),
        (SUM, "while True: print('x' * 1000)", "input 0: printed too much"),
        (ADD, "```cpp\nint add();\n```", "no code"),
        ({"tests": "def helper(): assert True"}, "x = 1", NOTHING),
        ({"tests": "class TestNothing:\n    x = 1"}, "x = 1", NOTHING),
        ({"tests": f"def test(x): pass\ntest.pytestmark = [type('', (), {NO_ROWS})]"}, "x = 1", NOTHING),
        ({"tests": "async def test(): assert False"}, "x = 1", "is not supported"),
        ({"tests": "def test():\n    yield\n    assert False"}, "x = 1", "is not supported"),
    ],
)
def test_reasons_say_what_failed(reward, task, text, reason):
    result = score(reward, task, text)
    assert reason in result.reason and result.value == 0.0


async def test_neighbours_scores_do_not_change_while_bombs_go_off(reward):
    brief = CodeReward(reward.sandbox, limits=SandboxLimits(processes=8), time_limits=TimeLimits(1.0, 1.0, 1.0))
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    bombs = [brief.score(completion(ADD, bomb, id="bomb")), brief.score(completion(SUM, bomb, id="bomb"))]
    texts = (PLUS, "def add(a, b): return 0")
    neighbours = [reward.score(completion(ADD, text)) for text in texts]
    right, wrong, *bombs = await asyncio.gather(*neighbours, *bombs)
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert [result.value for result in bombs] == [0.0, 0.0] and all("timed out" in result.reason for result in bombs)
    assert brief.take_counts() == {"code/runs": 2.0, "code/timed_out": 2.0, "code/killed": 0.0}


def test_what_is_killed_is_counted(reward):
    again = CodeReward(reward.sandbox)
    for task, text in ((SUM, "while True: print('x' * 1000)"), (ADD, PLUS)):
        score(again, task, text)
    assert again.take_counts() == {"code/runs": 2.0, "code/timed_out": 0.0, "code/killed": 1.0}
    assert not any(again.take_counts().values())


def test_a_share_of_the_inputs_counts_where_it_is_asked_for(reward):
    partial = CodeReward(reward.sandbox, partial=True)
    result = score(partial, SUM, "print(3)")
    assert (result.value, result.correct, dict(result.parts)) == (0.5, False, {"cases": 0.5})


def test_what_a_program_must_print_comes_on_top_of_what_it_may(reward):
    lines = LIMITS.output // 8
    task = {"inputs": [str(lines), "1"], "outputs": ["12 45 7\n" * lines, "12 45 7\n"]}
    assert score(reward, task, "for _ in range(int(input())): print('12 45 7 ')").correct
    result = score(reward, task, "while True: print('12 45 7')")
    assert not result.correct and "printed too much" in result.reason


def test_all_inputs_of_a_program_have_a_bound_together(reward):
    task = {"inputs": ["1", "2", "3", "4"], "outputs": ["1"] * 4}
    brief = CodeReward(reward.sandbox, seconds=1.5, partial=True, time_limits=TimeLimits(1.0, 1.0, 1.0))
    result = score(brief, task, "n = int(input())\nwhile n > 1: pass\nprint(1)")
    assert result.value == 0.25 and "timed out" in result.reason


def test_scores_are_the_same_each_time(reward):
    task = {"entry_point": "f", "tests": "import random\ndef check(candidate): assert candidate(random.random()) != 0"}
    text = "def f(x): return int(repr(x)[-1]) % 2 + hash('a') % 2"
    assert len({score(reward, task, text).value for _ in range(3)}) == 1


class Scripted:
    """A sandbox that runs nothing: each job takes the time that its code says, unless that is beyond its limit."""

    python = "python"

    async def run(self, job):
        needs = float(job.files["solution.py"])
        if needs > job.limits.seconds:
            return Outcome(137, seconds=job.limits.seconds, reason="time")
        return Outcome(0, b"right" if needs < 50 else b"wrong", seconds=needs)

    async def converse(self, asking, answering):
        raise NotImplementedError


class TestTimeLimits:
    TASK = {"inputs": ["", ""], "outputs": ["right", "right"]}  # noqa: RUF012

    def test_the_formula(self):
        limits = TimeLimits(2.0, 3.0, 30.0)
        assert limits.seconds("x") == 30.0
        for seconds, expected in ((0.1, 2.0), (4.0, 12.0), (1.0, 12.0), (20.0, 30.0)):
            limits.learn("x", seconds)
            assert limits.seconds("x") == expected
        assert limits.seconds("y") == 30.0
        fixed = TimeLimits(2.0, 3.0, 30.0, adaptive=False)
        fixed.learn("x", 1.0)
        assert fixed.seconds("x") == 30.0

    def test_only_correct_responses_are_learned_from_each_case_by_itself(self):
        reward = CodeReward(Scripted(), time_limits=TimeLimits(1.0, 2.0, 60.0))
        for text, value, limit in (("55", 0, 60.0), ("3", 1, 6.0), ("5", 1, 10.0), ("11", 0, 10.0), ("4", 1, 10.0)):
            assert score(reward, self.TASK, text).value == value
            assert reward.time_limits.seconds("code/1#0") == reward.time_limits.seconds("code/1#1") == limit
        assert reward.time_limits.seconds("code/2#0") == 60.0
        assert score(reward, self.TASK, "11").reason == "input 0: timed out after 10 s"

    def test_anchors_survive_a_checkpoint(self):
        first, second = (CodeReward(Scripted(), time_limits=TimeLimits(1.0, 2.0, 60.0)) for _ in range(2))
        score(first, self.TASK, "3")
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.time_limits.seconds("code/1#1") == 6.0 and second.state_dict() == first.state_dict()

    def test_limits_of_a_configuration(self):
        arguments = {
            "time_limits": {"factor": 3.0, "maximum": 9.0},
            "limits": {"processes": 7},
            "sandbox": "subprocess",
        }
        reward = find_reward("code", arguments=arguments)
        assert reward.time_limits == TimeLimits(2.0, 3.0, 9.0) and reward.limits == SandboxLimits(processes=7)
        for limits, seconds in ((reward.time_limits, 9.0), (TimeLimits(), 10.0)):  # the factor is 2 by default
            limits.learn("x", 5.0)
            assert limits.seconds("x") == seconds
        assert "no factors; it has minimum, factor, maximum, adaptive" in self.refused({"factors": 3.0})
        assert "time_limits is {'factor': '3'}" in self.refused({"factor": "3"})
        assert "time_limits.adaptive" in self.refused({"adaptive": 3}) and "at least 1" in self.refused({"factor": 0.5})

    def refused(self, limits):
        with pytest.raises(ConfigError) as caught:
            find_reward("code", arguments={"time_limits": limits})
        return str(caught.value)

    @pytest.mark.parametrize("settings", [(0.0, 2.0, 3.0), (4.0, 2.0, 3.0), (1.0, 0.5, 3.0), (1.0, 2.0, float("inf"))])
    def test_limits_that_make_no_sense(self, settings):
        with pytest.raises(ConfigError, match="time limits"):
            TimeLimits(*settings)
