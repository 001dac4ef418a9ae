"""The documentation: Sphinx with MyST; `make docs` builds it, and warnings are errors."""

project = "Evenload"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Evenload"
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]
