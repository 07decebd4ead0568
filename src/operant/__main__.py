"""`python -m operant` is `operant`."""

import sys

from operant.tools.cli import main

sys.exit(main())
