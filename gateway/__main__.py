"""``python -m gateway`` is ``medusa-gateway``."""

import sys

from gateway.cli import main

sys.exit(main())
