"""What stands in for a container image: read-only paths of this machine, seen at the same places.

The interpreter, its packages and the checkout are bound, and the directories above them are made fresh, so that a
process without rights reaches them although, say, a home directory above is closed. Imports nothing of the product.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SYSTEM_DIRS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
DEFAULT_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def image_binds() -> list[str]:
    """Absolute paths to bind read-only at the same place; none lies inside another."""
    wanted = [Path("/") / name for name in SYSTEM_DIRS]
    wanted += [Path(sys.base_prefix), Path(sys.prefix), CHECKOUT]
    # The link in a virtual environment names the interpreter, which may lie outside its prefix.
    wanted.append(Path(os.path.realpath(sys.executable)).parent)
    chosen: list[Path] = []
    for path in sorted({path for path in wanted if path.is_dir() and not path.is_symlink()}):
        if not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
    return [str(path) for path in chosen]


def image_links() -> dict[str, str]:
    """Symbolic links at the root, as on a system with a merged /usr: name -> target."""
    roots = [Path("/") / name for name in SYSTEM_DIRS]
    return {str(path): str(path.readlink()) for path in roots if path.is_symlink()}


def image_env() -> dict[str, str]:
    """Variables that an image would set and a Pod may override."""
    own = str(Path(sys.prefix) / "bin")
    return {"PATH": os.pathsep.join((own, *DEFAULT_PATH)), "HOME": "/", "LANG": "C.UTF-8"}
