"""`python -m kvjax` is the `kvjax` command."""

import sys

from kvjax.commands.main import main

sys.exit(main())
