"""The command `python -m models.generate`. Its code is in `rollout.generate_command`.

import-linter lets only this file of `models` import a higher package. No file of the packages imports this one, so that
no part of `models` depends on an engine.
"""

import sys

from rollout.generate_command import main

if __name__ == "__main__":
    sys.exit(main())
