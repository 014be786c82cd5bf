"""Makes the sample builders beside this file importable: tests have no packages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
