"""`python -m ddtree_guard` is the command line."""

import sys

from ddtree_guard.cli import main

sys.exit(main())
