"""Capture: the authors' PyTorch module as a ``captured`` program, without per-model code."""

from __future__ import annotations

from adaptc.capture.pipeline import capture, capture_module

__all__ = ["capture", "capture_module"]
