"""A vendor's package: a backend and its target. Nothing of adaptc knows it; see ``tests/test_vendor.py``."""

from pathlib import Path

TARGETS = Path(__file__).parent
