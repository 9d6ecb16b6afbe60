"""The command `python -m models.generate`. Its code is in `rollout.generate_command`.

import-linter lets only this file of `models` import a higher package. No file of the packages imports this one.
"""

import sys

from rollout.generate_command import main

if __name__ == "__main__":
    sys.exit(main())
