"""The command `python -m models.generate`, known by this name. What it does is in `rollout.generate_command`.

This is the one place where a lower layer names a higher one, and import-linter knows it as such: nothing imports this
file, so that no part of `models` comes to depend on an engine.
"""

import sys

from rollout.generate_command import main

if __name__ == "__main__":
    sys.exit(main())
