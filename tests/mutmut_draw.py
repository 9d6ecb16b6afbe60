"""Prints mutants that mutmut 3 makes of the coordinator, drawn by a seed, as JSON: see `tests/mutants.py`.

Mutmut itself would run them in a tree that it builds from single functions; here only its mutations are used, each as a
whole statement's old and new text. Imports nothing of fluxjax, so that mutmut may live in an environment of its own.
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

from mutmut.mutation.file_mutation import create_mutations, deep_replace  # pyright: ignore[reportMissingImports]

FOLDER = "fluxjax/coordinator"


def changed(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, with as many around them as make them unique in the file."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    first = next(i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    last = next(i for i, pair in enumerate(zip(old[::-1], new[::-1], strict=False)) if pair[0] != pair[1])
    last = min(last, len(old) - first - 1, len(new) - first - 1)
    while before.count("".join(old[first : len(old) - last])) > 1:
        first, last = max(first - 1, 0), max(last - 1, 0)
    return "".join(old[first : len(old) - last]), "".join(new[first : len(new) - last])


def drawn(count: int, seed: int) -> list[dict[str, str]]:
    """All mutants in the order of a shuffle; of those, the first that change anything."""
    made = []
    for file in sorted(pathlib.Path(FOLDER).rglob("*.py")):
        module, mutations, *_ = create_mutations(str(file), file.read_text())
        made += [(file, module, number, mutation) for number, mutation in enumerate(mutations)]
    print(f"{count} of {len(made)}", file=sys.stderr)
    random.Random(seed).shuffle(made)
    found: list[dict[str, str]] = []
    for file, module, number, mutation in made:
        after = deep_replace(module, mutation.original_node, mutation.mutated_node).code
        if after != module.code and len(found) < count:
            old, new = changed(module.code, after)
            found.append({"name": f"{file.relative_to(FOLDER)} {number}", "file": str(file), "old": old, "new": new})
        elif len(found) == count:
            break
    return sorted(found, key=lambda one: (one["file"], int(one["name"].partition(" ")[2])))


if __name__ == "__main__":
    json.dump(drawn(int(sys.argv[1]), int(sys.argv[2])), sys.stdout)
