"""A vendor's package: a backend and its target. Nothing of adaptc knows it; see ``tests/test_vendor.py``."""

from pathlib import Path

PROTOCOL = 1
TARGETS = Path(__file__).parent
