"""``python -m trine``."""

import sys

from trine.cli import main

sys.exit(main())
