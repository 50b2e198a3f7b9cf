"""The mechanisms that docs/extend.md writes, from their files, which lie outside of the package."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "examples"
sys.path.append(str(FOLDER))

from row_smoothing import RowSmoothing  # noqa: E402
from sigmoid_attention import SigmoidAttention  # noqa: E402
from talking_heads import TalkingHeads  # noqa: E402

__all__ = ["FOLDER", "RowSmoothing", "SigmoidAttention", "TalkingHeads"]
