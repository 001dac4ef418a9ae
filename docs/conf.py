"""The documentation: Sphinx with MyST; `make docs` builds it, and warnings are errors."""

project = "Evenload"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Evenload"
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]
default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
