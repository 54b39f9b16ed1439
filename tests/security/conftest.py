"""Puts the records and the fake machine of the other folders within reach."""

import sys
from pathlib import Path

for folder in ("runs", "tuner"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
