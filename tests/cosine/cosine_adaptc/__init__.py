"""A package that brings adaptc one operator: see ``docs/adding.md`` and ``tests/test_vendor_operator.py``.

Three modules for three entry points, as nothing of one may need what only another part of adaptc has: rows know no
torch, rules no kernels.
"""
