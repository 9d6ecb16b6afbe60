"""Prints every module with the first line of its docstring, a table a folder: python scripts/module_tables.py"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("fluxjax", "rollout", "models", "sharding", "configs")


def tables() -> str:
    """One table for each folder that has modules with a docstring."""
    folders: dict[pathlib.Path, list[tuple[str, str]]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(file.read_text()))
            if text:
                folders.setdefault(file.parent.relative_to(ROOT), []).append((file.name, text.splitlines()[0]))
    parts = []
    for folder in sorted(folders, key=lambda folder: (PACKAGES.index(folder.parts[0]), folder)):
        rows = [f"| `{folder}/{name}` | {line} |" for name, line in folders[folder]]
        parts.append(f"### {folder}/\n\n| module | what it is |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(tables())
