"""What is generated is what would be generated now."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_tables_of_the_readme_are_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert generate.filled(readme) == readme, "run: python docs/generate.py"
