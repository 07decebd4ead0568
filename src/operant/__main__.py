"""`python -m operant` is `operant`."""

from operant.tools.cli import main

raise SystemExit(main())
