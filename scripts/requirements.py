"""Prints what the package needs, and what the extras that are named need: pip installs it while the package itself is built.

python scripts/requirements.py test plot
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(
    *project["dependencies"],
    *(one for extra in sys.argv[1:] for one in project["optional-dependencies"][extra]),
    sep="\n",
)
