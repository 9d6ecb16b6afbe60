"""Tools that are ready to use: a calculator, tools on the images of an episode, and Python in the sandbox.

The images of an episode are numbered from 1: those of the prompt, then those that tools showed.
"""

import ast
import decimal
import functools
import math
import operator
from typing import Any

from PIL import Image, ImageDraw

from ..rewards.code import ended
from ..rewards.sandbox import SandboxJob, SandboxLimits, find_sandbox

_LONGEST = 300  # characters of an expression
_EXACT, _SHOWN = (decimal.Context(digits, Emax=999, Emin=-999) for digits in (60, 15))  # bounds of every number
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_OPERATORS: dict[Any, Any] = _BINARY | {ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg}
_LEAST, _MOST, _NARROW = 28, 1536, 50  # pixels of the sides of images that are shown, and the largest ratio of sides
_sandbox = functools.cache(find_sandbox)


def calculator(expression: str) -> str:
    """Computes an expression of numbers, + - * / ** and parentheses."""
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    try:
        with decimal.localcontext(_EXACT):
            value = _value(ast.parse(expression.strip(), mode="eval").body) + 0
    except (ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        text = f"{expression} can't be computed ({type(error).__name__})"
        raise ValueError(f"{text}; numbers, + - * / ** and parentheses are allowed") from None
    whole = value == value.to_integral_value() and value.adjusted() < _EXACT.prec
    return f"{value:.0f}" if whole else str(_SHOWN.plus(value).normalize(_SHOWN))


def _value(node: ast.expr) -> decimal.Decimal:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool) and number < math.inf:
            return decimal.Decimal(str(number))
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(sign, operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand))
    raise ValueError


def crop(images: list[Image.Image], box: list[int | float], image: int = 1) -> Image.Image:
    """Shows the part of an image within a box [left, top, right, bottom], in thousandths of its width and height."""
    shown, pixels = _chosen(images, image, box)
    return _fitted(shown.crop(pixels))


def zoom(images: list[Image.Image], cell: int, grid: int = 3, image: int = 1) -> Image.Image:
    """Shows a part of an image enlarged: a cell of a grid of `grid` times `grid`, numbered from 1 row by row."""
    if not (1 <= grid <= 32 and 1 <= cell <= grid**2):
        raise ValueError(f"grid must be at most 32, and cell from 1 to grid * grid; they are {grid} and {cell}")
    top, left = divmod(cell - 1, grid)
    box = [1000 * side / grid for side in (left, top, left + 1, top + 1)]
    shown, pixels = _chosen(images, image, box)
    return _fitted(shown.crop(pixels), grid)


def draw(images: list[Image.Image], box: list[int | float], image: int = 1) -> Image.Image:
    """Shows an image with a red frame around a box [left, top, right, bottom], in thousandths of width and height."""
    shown, (left, top, right, bottom) = _chosen(images, image, box)
    ImageDraw.Draw(shown).rectangle((left, top, right - 1, bottom - 1), outline="red", width=max(shown.size) // 200 + 1)
    return _fitted(shown)


def _chosen(
    images: list[Image.Image], number: int, box: list[int | float]
) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """Returns a copy of an image, and a box in its pixels. Raises ValueError."""
    if not 1 <= number <= len(images):
        raise ValueError(f"image must be a number from 1 to {len(images)}, not {number}")
    if len(box) != 4 or not (0 <= box[0] < box[2] <= 1000 and 0 <= box[1] < box[3] <= 1000):
        raise ValueError("box must be [left, top, right, bottom] from 0 to 1000, with left < right and top < bottom")
    image = images[number - 1].convert("RGB").copy()
    left, top, right, bottom = (round(side * size / 1000, 6) for side, size in zip(box, image.size * 2, strict=True))
    return image, (math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom))


def _fitted(image: Image.Image, enlarge: int = 1) -> Image.Image:
    """Returns the image enlarged, with sides that models can read. Raises ValueError if it is too narrow."""
    if max(image.size) > _NARROW * min(image.size):
        raise ValueError("a part of this shape is too narrow to be shown")
    factor = max(min(enlarge, _MOST / max(image.size)), _LEAST / min(image.size))
    return image if factor == 1 else image.resize((round(image.width * factor), round(image.height * factor)))


async def python(code: str) -> str:
    """Runs a Python program in a sandbox, and shows what it prints. Nothing remains for the next program."""
    sandbox, limits, files = _sandbox("bubblewrap"), SandboxLimits(), {"main.py": code.encode(errors="replace")}
    outcome = await sandbox.run(SandboxJob((sandbox.python, "-I", "-B", "main.py"), files, limits=limits))
    printed = outcome.stdout.decode(errors="replace")
    if failure := ended(outcome, limits):
        raise ValueError(f"{failure}\n{printed}")
    return printed
