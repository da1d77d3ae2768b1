"""``python -m minillm``."""

import sys

from minillm.cli.main import main

sys.exit(main())
