"""schemathesis asks the service what its own OpenAPI description allows and forbids, and finds nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = shutil.which("schemathesis") or shutil.which(str(Path(sys.executable).with_name("schemathesis")))


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason="schemathesis is not installed")
def test_the_service_does_what_it_describes(client, tmp_path):
    command = [
        TOOL, "run", f"http://127.0.0.1:{client.port}/openapi.json", "--max-examples", "60", "--seed", "1",
        "--phases", "examples,coverage,fuzzing,stateful", "--suppress-health-check", "all",
        # A schema cannot say that bytes are an image: random ones are rightly refused.
        "--exclude-checks", "positive_data_acceptance",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "generated" in done.stdout
    assert client.get("/healthz").status == 200
