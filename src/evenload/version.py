"""The version of Evenload, in a file of its own so that every package can read it without the public names."""

from __future__ import annotations

__version__ = "0.1.0"
