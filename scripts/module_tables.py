"""Writes the module tables of docs/structure.md: each module with the first line of its docstring.

python scripts/module_tables.py            rewrites what stands behind "## Modules"
python scripts/module_tables.py --check    changes nothing; status 1 if the tables are not up to date
"""

import argparse
import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "structure.md"
PACKAGES = ("fluxjax", "rollout", "models", "sharding", "configs")
HEADING = "## Modules\n"


def tables() -> str:
    """One table for each folder that has modules with a docstring."""
    folders: dict[pathlib.Path, list[tuple[str, str]]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            text = ast.get_docstring(ast.parse(file.read_text()))
            if text:
                folders.setdefault(file.parent.relative_to(ROOT), []).append((file.name, text.splitlines()[0]))
    parts = [HEADING, "`python scripts/module_tables.py` writes these tables from the modules' docstrings.\n"]
    for folder in sorted(folders, key=lambda folder: (PACKAGES.index(folder.parts[0]), folder)):
        rows = [f"| `{folder}/{name}` | {line} |" for name, line in folders[folder]]
        parts.append(f"### {folder}/\n\n| module | what it is |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are up to date")
    options = parser.parse_args()
    before = FILE.read_text()
    after = before[: before.index(HEADING)] + tables()
    if options.check:
        if before != after:
            print("docs/structure.md: the module tables are old; run python scripts/module_tables.py", file=sys.stderr)
        return int(before != after)
    FILE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
