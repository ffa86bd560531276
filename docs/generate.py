"""Write the generated parts of README.md and docs/: `python docs/generate.py`, or with `--check` only compare them.

Pages that are generated as a whole (methods, studies, API reference) are written when the site is built: `make docs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from generator.parts import filled, pages
from generator.scores import ROOT

if __name__ == "__main__":
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            if "--check" in sys.argv:
                sys.exit(f"{page.relative_to(ROOT)} is out of date; run python docs/generate.py")
            page.write_text(after, encoding="utf-8")
