"""The command `python -m models.generate`. Its code is in `rollout.generate_command`.

No other file of a lower layer imports a higher one; import-linter has an exception for this file. Nothing imports it,
so that no part of `models` depends on an engine.
"""

import sys

from rollout.generate_command import main

if __name__ == "__main__":
    sys.exit(main())
