"""Tools in processes: Python functions, images, the sandbox, a real MCP server; malformed calls and failing tools."""

import contextlib
import json
import pathlib
import sys

import numpy as np
import pytest
from PIL import Image
from process_cases import gone, until
from sandboxes import bubblewrap

from fluxjax.base.errors import ConfigError
from fluxjax.base.medium import Media, MediaKind
from fluxjax.base.scored import Prompt
from fluxjax.environments import EnvironmentFailure, EnvironmentLimits, EnvironmentPool, Fault
from fluxjax.environments.ready_tools import calculator, crop, draw, zoom

pytest.importorskip("mcp", reason="needs the extra `environments`")
pytestmark = pytest.mark.medium


def prompt(*images: pathlib.Path) -> Prompt:
    return Prompt(
        "p", "tools", "<image>" * len(images), "", tuple(Media(MediaKind.IMAGE, str(path)) for path in images)
    )


@contextlib.asynccontextmanager
async def opened(folder, **bounds):
    pool = EnvironmentPool(folder, EnvironmentLimits(concurrency=2, **bounds))
    try:
        yield pool
    finally:
        await pool.close()


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tagged(name, /, **arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


async def played(pool, tools, turns, images=(), **arguments):
    episode = await pool.start("tools", prompt(*images), 0, {"tools": tools, **arguments})
    seen = [episode.observation, *[await episode.act(turn) for turn in turns]]
    await episode.end()
    return seen


async def answers(pool, tools, turns, **arguments):
    return [observed.text for observed in (await played(pool, tools, turns, **arguments))[1:]]


# --- functions --------------------------------------------------------------------------------------


async def test_calls_of_both_forms_are_answered_until_a_turn_has_none(tmp_path):
    turns = [
        f"Let me see. {call('add', a=1, b=2)}{tagged('calculator', expression='2 ** 70')}",
        tagged("add", a="3", unit="cm"),
        "It is 3.",
    ]
    async with opened(tmp_path) as pool:
        first, two, one, last = await played(pool, ["calculator", "tool_functions:add"], turns)
    assert (first.text, first.done, two.text) == ("", False, "3 m\n1180591620717411303424")
    assert two.info == {"calls": 2, "malformed": 0, "errors": 0} and not two.done
    assert one.text == "3.5 cm"
    assert last.done and (last.text, last.reward, last.info["calls"]) == ("", 0.0, 0)


async def test_tools_are_described_from_signature_and_docstring(tmp_path):
    schema = {"name": "say", "description": "Says it.", "parameters": {"type": "object", "properties": {"text": {}}}}
    tools = [
        "tool_functions:add",
        "tool_functions:sizes",
        {"type": "function", "function": schema, "path": "tool_functions:echo"},
    ]
    async with opened(tmp_path) as pool:
        described, said = await played(pool, tools, [call("say", text="a")], instructions="Use tools.", describe=True)
        (bare,) = await played(pool, tools, [])
    heading, add, sizes, say = described.text.split("\n")
    assert (heading, bare.text, said.text) == ("Use tools.", "", "a")
    assert json.loads(say) == {"type": "function", "function": schema}
    assert json.loads(sizes)["function"]["parameters"]["properties"] == {"factor": {"default": 1, "type": "integer"}}
    assert json.loads(add)["function"] == {
        "name": "add",
        "description": "Adds two lengths.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "number", "default": 0.5},
                "unit": {"type": "string", "enum": ["m", "cm"], "default": "m"},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    }


REFUSED = [
    (call("add"), "error: a: Field required"),
    (call("add", a="x"), "error: a: Input should be a valid integer"),
    (call("add", a=1.5), "error: a: Input should be a valid integer"),
    (call("add", a=1, z=2), "error: z: Extra inputs are not permitted"),
    (call("add", a=1, unit="km"), "error: unit: Input should be 'm' or 'cm'"),
    (tagged("add", a="[1"), "error: a: Input should be a valid integer"),
    (tagged("add", a="1" * 5000), "error: a: "),
    (call("sizes", images=[]), "error: images: Extra inputs are not permitted"),
    (call("fails", how="value"), "error: no such value"),
    (call("fails", how="key"), "error: KeyError: 'x'"),
    (call("fails", how="zero"), "error: ZeroDivisionError"),
    (call("calculator", expression="1/0"), "error: 1/0 can't be computed (DivisionByZero)"),
]
MALFORMED = [
    (call("subtract", a=1), "error: no tool is named subtract; the tools are add, "),
    ("<tool_call>{</tool_call>", "error: Expecting property name enclosed in double quotes; the tools are add, "),
    (call("x" * 10_000), "error: no tool is named xxx"),
]
TOOLS = [*(f"tool_functions:{name}" for name in ("add", "sizes", "echo", "fails", "data", "nothing")), "calculator"]


async def test_wrong_calls_are_answered_and_counted(tmp_path):
    async with opened(tmp_path) as pool:
        turns = [turn for turn, _ in (*REFUSED, *MALFORMED)]
        _, *seen = await played(pool, TOOLS, turns, max_turns=99)
        mixed = (await played(pool, TOOLS, [f"{turns[0]}{turns[-2]}{call('add', a=1)}"]))[1]
        assert pool.metrics()["environments/failed"] == 0.0
    for (_, text), observed in zip((*REFUSED, *MALFORMED), seen, strict=True):
        assert observed.text.startswith(text) and len(observed.text) < 4200 and not observed.done
    assert [(s.info["malformed"], s.info["errors"]) for s in seen] == [(0, 1)] * len(REFUSED) + [(1, 0)] * len(
        MALFORMED
    )
    assert mixed.info == {"calls": 3, "malformed": 1, "errors": 1} and mixed.text.endswith("\n1.5 m")


async def test_texts_become_what_the_schema_allows(tmp_path):
    turns = [
        tagged("echo", text="12", times="2"),
        tagged("echo", text="null", tags='["1", "2"]'),
        tagged("echo", text='{"a": 1}'),
        tagged("nothing"),
        call("echo", text="\ud800 <image>"),
    ]
    async with opened(tmp_path) as pool:
        found = await answers(pool, TOOLS, turns)
    assert found == ["1212", "error: tags: Input should be a valid list", '{"a": 1}', "null", "? [image]"]


async def test_what_a_tool_returns_is_shown(tmp_path):
    kinds = ["numbers", "list", "nothing", "empty", "texts", "much text", "half a surrogate", "marks"]
    async with opened(tmp_path, text_bytes=10_000) as pool:
        found = await answers(pool, TOOLS, [call("data", kind=kind) for kind in kinds])
        limited = await answers(pool, TOOLS, [call("data", kind="much text")], characters=3)
    assert found[:5] == ['{"a": [0, 1, 2], "b": 0.5, "c": [1, null, true]}', "[1, 2]", "null", "[]", "a\nb"]
    assert found[5:] == ["x" * 4096 + "... (100000 characters)", "a?b", "[image] and [video]"]
    assert limited == ["xxx... (100000 characters)"]


async def test_images_in_answers(tmp_path):
    turns = [
        f"{call('data', kind='images')}{call('data', kind='marks')}",
        call("sizes", factor=2),
        call("data", kind="many images"),
        call("data", kind="many images") * 3,
    ]
    source = tmp_path / "source.png"
    Image.new("RGBA", (30, 20)).save(source)
    async with opened(tmp_path / "media") as pool:
        _, shown, sizes, many, _ = await played(pool, TOOLS, turns, [source])
        with pytest.raises(EnvironmentFailure) as caught:
            await played(pool, TOOLS, [call("data", kind="corrupt image")])
    assert shown.text == "first\n<image>\nthen\n<image>\n<image>\n[image] and [video]" and len(shown.media) == 3
    assert np.asarray(Image.open(shown.media[0].path)).tolist() == [[[0, 128, 0]] * 8] * 4
    assert json.loads(sizes.text) == [["RGB", 60, 40], ["RGB", 16, 8], ["RGB", 16, 8], ["L", 16, 8]]
    assert many.text == "\n".join(["<image>"] * 8) and len(many.media) == 8
    assert caught.value.fault is Fault.MEDIUM


async def test_bounds_of_turns_and_calls(tmp_path):
    async with opened(tmp_path) as pool:
        _, many, last = await played(pool, ["calculator"], [call("calculator", expression="1") * 9] * 2, max_turns=2)
    assert many.text == "\n".join(["1"] * 8) + "\nerror: only 8 calls of a turn are answered"
    assert many.info["calls"] == 9 and last.done and last.text == ""


async def test_a_tool_that_fails_itself_fails_the_episode(tmp_path):
    async with opened(tmp_path) as pool:
        for how, fault, reason in (("disk", Fault.RAISED, "OSError: full"), ("exits", Fault.DIED, "ended its process")):
            with pytest.raises(EnvironmentFailure, match=reason) as caught:
                await played(pool, TOOLS, [call("fails", how=how)])
            assert caught.value.fault is fault
        with pytest.raises(EnvironmentFailure, match=r"Media(Error|Unavailable)") as caught:
            await played(pool, TOOLS, [call("sizes")], [tmp_path / "nothing.png"])
        assert caught.value.fault is Fault.RAISED


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (["calculater"], "tools has 'calculater'; it must have calculator, crop, zoom, draw, python, module:function"),
        ([{"function": {"name": "x"}}], "tools has {'function': {'name': 'x'}}; it must have"),
        (["tool_functions:missing"], "tool_functions has no 'missing'; it has .*echo"),
        (["calculator", "calculator"], "several tools of one name: calculator"),
        ([{"mcp": {"command": "no-such-command"}}], "MCP server .*no-such-command.* can't be started: .*No such file"),
        ("calculator", "tools is 'calculator'; it must be of type list"),
    ],
)
async def test_wrong_settings_are_named(tools, text, tmp_path):
    async with opened(tmp_path) as pool:
        with pytest.raises(ConfigError, match=text):
            await played(pool, tools, [])


# --- MCP --------------------------------------------------------------------------------------------

SERVER = """
import io, os, pathlib, sys
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
import PIL.Image

server, count = MCPServer("test"), 0
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))

@server.tool()
def next_number(step: int = 1) -> int:
    "Counts."
    global count
    count += step
    return count

@server.tool()
def show(client: str, name: str) -> list:
    content = io.BytesIO()
    PIL.Image.new("RGB", (6, 3), "blue").save(content, "png")
    return [f"{client} {name}", Image(data=content.getvalue(), format="png")]

@server.tool()
def refuse() -> str:
    raise ToolError("not today")

@server.tool()
def die() -> str:
    os._exit(3)

server.run()
"""


@pytest.mark.slow
async def test_tools_of_an_mcp_server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    pid = tmp_path / "pid"
    server = {"mcp": {"command": sys.executable, "args": [str(tmp_path / "server.py"), str(pid)]}}
    turns = [
        call("next_number") + tagged("next_number", step="5"),
        tagged("show", client="12", name="é") + call("sizes"),
        call("refuse") + call("next_number", step="much") + call("calculator", expression="1+1"),
        call("sizes"),
    ]
    async with opened(tmp_path / "media") as pool:
        tools = [server, "calculator", "tool_functions:sizes"]
        first, counted, shown, refused, sizes = await played(pool, tools, turns, describe=True)
        until(lambda: gone(int(pid.read_text())))  # the server ends with its episode
        anew = await answers(pool, tools, turns[:1])
        with pytest.raises(EnvironmentFailure, match="MCPError: Connection closed"):
            await played(pool, tools, [call("die")])
        with pytest.raises(EnvironmentFailure) as caught:
            await played(pool, [{"mcp": {"command": sys.executable, "args": ["-c", ""]}}], [])
        assert caught.value.fault is Fault.RAISED
        assert await answers(pool, ["calculator"], [call("calculator", expression="2")]) == ["2"]
    described = [json.loads(line)["function"] for line in first.text.split("\n")]
    assert [tool["name"] for tool in described] == ["next_number", "show", "refuse", "die", "calculator", "sizes"]
    assert described[0]["description"] == "Counts." and "step" in described[0]["parameters"]["properties"]
    assert counted.text == "1\n6" and anew == ["1\n6"]
    assert shown.text == "12 é\n<image>\n[]" and len(shown.media) == 1 and json.loads(sizes.text) == [["RGB", 6, 3]]
    lines = refused.text.split("\n")
    assert "not today" in lines[0] and "error" in lines[1] and lines[-1] == "2"
    assert refused.info == {"calls": 3, "malformed": 0, "errors": 2}


# --- ready tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * (3 - 4) / 8", "0.75"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("-2 ** 2", "-4"),
        ("+1_000 * 3", "3000"),
        ("2 / 3", "0.666666666666667"),
        ("9 ** 0.5", "3"),
        ("10 ** 61", "1E+61"),
        ("-" * 200 + "1", "1"),
        ("-0", "0"),
        (" 7\n", "7"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "1/0",
            "0 ** 0",
            "(-8) ** (1/3)",
            "9 ** 9 ** 9 ** 9",
            "1e999",
            "1 if 1 else 2",
            "x",
            "f(1)",
            "'a' * 9",
            "1,2",
        ),
        *("(" * 250, "1 + " * 75 + "1", "True", "1j", "7 // 2", "__import__('os')", "\0", "\ud800", "[1][0]", "1 < 2"),
    ],
)
def test_the_calculator_refuses(expression):
    with pytest.raises(ValueError, match=r"can.t be computed|has at most 300 characters"):
        calculator(expression)


def photograph(width=90, height=60):
    """Each pixel is of another colour."""
    return Image.fromarray(
        np.stack([*np.meshgrid(np.arange(width), np.arange(height)), np.full((height, width), 9)], -1).astype(np.uint8)
    )


def test_parts_of_images():
    pixels = np.asarray(photograph())
    images = [photograph(), Image.new("L", (40, 40), 200)]
    np.testing.assert_array_equal(np.asarray(crop(images, [0, 0, 1000, 1000])), pixels)
    np.testing.assert_array_equal(np.asarray(crop(images, [500, 250, 1000, 750])), pixels[15:45, 45:])
    assert np.asarray(crop(images, [999, 999, 1000, 1000])).tolist() == [[[89, 59, 9]] * 28] * 28
    assert np.asarray(crop(images, [0, 0, 1000, 1000], 2)).tolist() == [[[200] * 3] * 40] * 40
    for number in range(9):
        part = zoom(images, number + 1)
        assert part.size == (90, 60)
        row, column = divmod(number, 3)
        exact = Image.fromarray(pixels[20 * row : 20 * row + 20, 30 * column : 30 * column + 30]).resize((90, 60))
        np.testing.assert_array_equal(np.asarray(part), np.asarray(exact))
    framed = np.asarray(draw(images, [0, 0, 500, 500]))
    red = (framed == [255, 0, 0]).all(-1)
    assert red[:30, :45].sum() == red.sum() == 2 * 45 + 2 * 28 and red[0, 44] and red[29, 0]
    np.testing.assert_array_equal(framed[~red], pixels[~red])
    np.testing.assert_array_equal(np.asarray(images[0]), pixels)


def test_parts_are_neither_huge_nor_tiny():
    large = [Image.new("RGB", (8000, 4000))]
    assert crop(large, [0, 0, 1000, 1000]).size == draw(large, [1, 1, 2, 2]).size == (1536, 768)
    assert zoom(large, 1).size == (1536, 768) and zoom(large, 1, 32).size == (1536, 768)
    assert crop(large, [0, 0, 1, 50]).size == (28, 700)


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        (crop, {"box": [0, 0, 1, 1000], "image": 1}, "too narrow"),
        (crop, {"box": [0, 0, 0, 1000]}, "box must be"),
        (crop, {"box": [0, 0, 1000]}, "box must be"),
        (crop, {"box": [-1, 0, 1000, 1000]}, "box must be"),
        (crop, {"box": [0, 0, float("nan"), 1000]}, "box must be"),
        (crop, {"box": [0, 0, 1e300, 1000]}, "box must be"),
        (draw, {"box": [0, 0, 1000, 1000], "image": 0}, "image must be a number from 1 to 1, not 0"),
        (zoom, {"cell": 1, "image": 2}, "image must be a number from 1 to 1, not 2"),
        (zoom, {"cell": 10}, "cell from 1 to grid"),
        (zoom, {"cell": 0}, "cell from 1 to grid"),
        (zoom, {"cell": 1, "grid": 33}, "grid must be at most 32"),
        (zoom, {"cell": 1, "grid": -3}, "grid must be at most 32"),
    ],
)
def test_parts_that_there_are_not(tool, arguments, text):
    with pytest.raises(ValueError, match=text):
        tool([Image.new("RGB", (90, 600))], **arguments)


async def test_image_tools_on_a_prompt(tmp_path):
    source = tmp_path / "photograph.png"
    photograph().save(source)
    turns = [
        call("zoom", cell=9),
        tagged("crop", box="[0, 0, 500, 500]", image="2"),
        call("draw", box=[0, 0, 9, 9], image=9),
    ]
    async with opened(tmp_path / "media") as pool:
        _, zoomed, cropped, refused = await played(pool, ["crop", "zoom", "draw"], turns, [source])
    assert zoomed.text == cropped.text == "<image>"
    whole, part = (np.asarray(Image.open(seen.media[0].path)) for seen in (zoomed, cropped))
    np.testing.assert_array_equal(part, whole[:30, :45])
    assert refused.text == "error: image must be a number from 1 to 3, not 9"


@pytest.mark.slow
async def test_python_in_the_sandbox(tmp_path):
    bubblewrap()  # skips if there is none
    programs = [
        "print(6 * 7)",
        "print('a')\n1/0",
        "import os; print(os.listdir('/work'))",
        "while True: pass",
        "print('\ud800')",
    ]
    async with opened(tmp_path) as pool:
        found = await answers(pool, ["python"], [call("python", code=code) for code in programs[:3]])
        (tag,) = await answers(pool, ["python"], [tagged("python", code="if True:\n    print('</parameter>')")])
    assert found[0] == "42\n"
    assert found[1] == "error: exit status 1 ZeroDivisionError: division by zero\na\n"
    assert "FileNotFoundError" in found[2]
    assert tag == "</parameter>\n"
