"""Which Evenload this is: a file of its own, so that every room may ask without the package's public names."""

from __future__ import annotations

__version__ = "0.1.0"
